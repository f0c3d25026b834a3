# type: ignore  # torchrec is served at run time
"""Trains, validates and tests a DLRM (original, DCN or projection) on Criteo rows: with the names, calls and order of
calls of facebookresearch/dlrm's program and of MLPerf training's, in words of our own.

Started by torchrun; `--adagrad --interaction_type dcn --multi_hot_sizes ...` is the MLPerf setting.
"""

import argparse
import itertools
import os
import sys

import torch
import torch.distributed as dist
from data.dlrm_dataloader import get_dataloader  # noqa: TID251  the program's own folder
from known_weights import print_losses, set_known_weights
from lr_scheduler import LRPolicyScheduler
from multi_hot import Multihot, RestartableMap
from torchrec import EmbeddingBagCollection
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

STAGES_AHEAD = 2


def numbers(text):
    return [int(number) for number in text.split(",")]


def parse_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--limit_train_batches", type=int)
    parser.add_argument("--limit_val_batches", type=int)
    parser.add_argument("--num_embeddings", type=int, default=100_000)
    parser.add_argument("--num_embeddings_per_feature", type=numbers)
    parser.add_argument("--embedding_dim", type=int, default=16)
    parser.add_argument("--dense_arch_layer_sizes", type=numbers, default=[32, 16])
    parser.add_argument("--over_arch_layer_sizes", type=numbers, default=[32, 1])
    parser.add_argument("--interaction_type", choices=["original", "dcn", "projection"], default="original")
    parser.add_argument("--dcn_num_layers", type=int, default=2)
    parser.add_argument("--dcn_low_rank_dim", type=int, default=8)
    parser.add_argument("--in_memory_binary_criteo_path")
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--adagrad", action="store_true")
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--multi_hot_sizes", type=numbers)
    parser.add_argument("--multi_hot_distribution_type", default="uniform")
    parser.add_argument("--lr_warmup_steps", type=int, default=0)
    parser.add_argument("--lr_decay_start", type=int, default=0)
    parser.add_argument("--lr_decay_steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    for flag in ("pin_memory", "mmap_mode", "shuffle_batches", "shuffle_training_set", "drop_last_training_batch"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--print_sharding_plan", action="store_true")
    return parser.parse_args(argv)


def batches_of(loader, limit):
    # what the pipeline has in flight when the last batch is done must be something
    return itertools.chain(itertools.islice(iter(loader), limit), itertools.islice(iter(loader), STAGES_AHEAD))


def train(pipeline, loader, limit, scheduler):
    pipeline._model.train()
    # the pipeline begins anew with another iterator
    pipeline._connected = False
    iterator, losses = batches_of(loader, limit), []
    while True:
        try:
            loss, _, _ = pipeline.progress(iterator)
            scheduler.step()
            losses.append(loss.item())
        except StopIteration:
            return losses


def evaluate(pipeline, loader, limit):
    pipeline._model.eval()
    device = pipeline._device
    pipeline._connected = False
    iterator, seen = batches_of(loader, limit), []
    with torch.no_grad():
        while True:
            try:
                _loss, logits, labels = pipeline.progress(iterator)
                seen.append((torch.sigmoid(logits), labels))
            except StopIteration:
                break
    scores, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    samples = torch.tensor(len(labels), device=device)
    dist.reduce(samples, 0, op=dist.ReduceOp.SUM)
    wins = (scores[labels == 1][:, None] > scores[labels == 0][None]).double()
    return [wins.mean().item(), scores.double().mean().item()]


def make_model(args, device):
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature_name}",
            embedding_dim=args.embedding_dim,
            num_embeddings=(args.num_embeddings_per_feature or [args.num_embeddings] * len(DEFAULT_CAT_NAMES))[idx],
            feature_names=[feature_name],
        )
        for idx, feature_name in enumerate(DEFAULT_CAT_NAMES)
    ]
    shape = {
        "embedding_bag_collection": EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        "dense_in_features": len(DEFAULT_INT_NAMES),
        "dense_arch_layer_sizes": args.dense_arch_layer_sizes,
        "over_arch_layer_sizes": args.over_arch_layer_sizes,
        "dense_device": device,
    }
    if args.interaction_type == "dcn":
        return DLRM_DCN(**shape, dcn_num_layers=args.dcn_num_layers, dcn_low_rank_dim=args.dcn_low_rank_dim)
    if args.interaction_type == "projection":
        sizes = [2 * args.embedding_dim]
        return DLRM_Projection(**shape, interaction_branch1_layer_sizes=sizes, interaction_branch2_layer_sizes=sizes)
    return DLRM(**shape)


def main(argv):
    args = parse_args(argv)
    rank = int(os.environ["LOCAL_RANK"])
    device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend=backend)
    loaders = {stage: get_dataloader(args, backend, stage) for stage in ("train", "val", "test")}

    train_model = DLRMTrain(make_model(args, device))
    embedding_optimizer = torch.optim.Adagrad if args.adagrad else torch.optim.SGD
    # of dense layers too, and of the small tables that TorchRec's planner hands to their optimizer
    settings = {"lr": args.learning_rate, **({"eps": args.eps} if args.adagrad else {})}
    apply_optimizer_in_backward(embedding_optimizer, train_model.model.sparse_arch.parameters(), {**settings})
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device=device.type
        ),
        batch_size=args.batch_size,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    plan = planner.collective_plan(train_model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=train_model, device=device, plan=plan)
    set_known_weights(model)
    if rank == 0 and args.print_sharding_plan:
        for collection, tables in model._plan.plan.items():
            print(collection)
            for table_name, sharding in tables.items():
                print(table_name, "\n", sharding, "\n")

    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: embedding_optimizer(params, **settings),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    scheduler = LRPolicyScheduler(optimizer, args.lr_warmup_steps, args.lr_decay_start, args.lr_decay_steps)
    if args.multi_hot_sizes is not None:
        multi_hot = Multihot(args.multi_hot_sizes, args.num_embeddings_per_feature, args.multi_hot_distribution_type)
        loaders = {stage: RestartableMap(multi_hot.convert_to_multi_hot, loader) for stage, loader in loaders.items()}

    pipelines = {stage: TrainPipelineSparseDist(model, optimizer, device) for stage in loaders}
    losses, metrics = [], []
    for _ in range(args.epochs):
        losses += train(pipelines["train"], loaders["train"], args.limit_train_batches, scheduler)
        metrics += evaluate(pipelines["val"], loaders["val"], args.limit_val_batches)
    metrics += evaluate(pipelines["test"], loaders["test"], args.limit_val_batches)
    print_losses(losses=losses, metrics=metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
