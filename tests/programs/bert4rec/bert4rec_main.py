# type: ignore  # torchrec is served at run time
"""Trains and validates BERT4Rec on two ranks, model parallel (`--mode dmp`) or data parallel (`--mode ddp`): with the
names and calls of TorchRec's example, in words of our own. Started by torchrun."""

import argparse
import os
from typing import Any, Dict, cast  # noqa: UP035

import torch
import torch.distributed as dist
from data.sequences import get_dataloader  # noqa: TID251  the program's own folder
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from known_weights import print_losses, set_known_weights
from models.bert4rec import BERT4Rec  # noqa: TID251
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel as DMP
from torchrec.distributed.types import ModuleSharder
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def to_kjt(seqs: torch.Tensor, device: torch.device) -> KeyedJaggedTensor:
    rows = list(seqs)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["item"], values=torch.cat(rows), lengths=torch.IntTensor([row.size(0) for row in rows])
    ).to(device)


def train_one_epoch(model, loader, device, optimizer, lr_scheduler):
    model.train()
    losses, ce = [], nn.CrossEntropyLoss(ignore_index=0)
    for seqs, labels in loader:
        optimizer.zero_grad()
        logits = model(to_kjt(seqs, device))
        loss = ce(logits.view(-1, logits.size(-1)), labels.view(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    lr_scheduler.step()
    return losses


def validate(model, loader, device):
    model.eval()
    hits = []
    with torch.no_grad():
        for seqs, labels in loader:
            scores = model(to_kjt(seqs, device))[:, -1, :]
            hits.append((scores.topk(5).indices == labels[:, -1:]).any(dim=1).double())
    return torch.cat(hits).mean().item()


def make_parallel(model, args, device):
    if args.mode == "ddp":
        # the parameters must be the same before, as they are known afterwards
        parallel = DDP(model)
        return parallel, optim.Adam(parallel.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    fused_params: Dict[str, Any] = {}  # noqa: UP006
    # FBGEMM has no Adam on the CPU
    fused_params["optimizer"] = EmbOptimType[args.fused_optimizer]
    fused_params["learning_rate"] = args.lr
    fused_params["weight_decay"] = args.weight_decay
    parallel = DMP(
        module=model,
        device=device,
        sharders=[cast(ModuleSharder[nn.Module], EmbeddingCollectionSharder(fused_params))],
    )
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda params: optim.Adam(params, lr=args.lr, weight_decay=args.weight_decay),
    )
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense_optimizer])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="dmp", choices=["dmp", "ddp"])
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--fused_optimizer", default="EXACT_ROWWISE_ADAGRAD", choices=EmbOptimType.__members__)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--items", type=int, default=40)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
    max_len = 8
    loader = get_dataloader(rank, world_size, 16, 128, args.items, max_len)
    bert = BERT4Rec(args.items + 2, max_len, emb_dim=16, nhead=2, num_layers=2).to(device)
    model, optimizer = make_parallel(bert, args, device)
    set_known_weights(model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    losses, metrics = [], [validate(model, loader, device)]
    for epoch in range(args.num_epochs):
        loader.sampler.set_epoch(epoch)
        losses += train_one_epoch(model, loader, device, optimizer, scheduler)
        metrics.append(validate(model, loader, device))
    print_losses(losses=losses, metrics=metrics)


if __name__ == "__main__":
    main()
