# type: ignore  # torchrec is served at run time
"""Trains two towers on two ranks, gathers the state on rank 0's CPU, fills an index with the items, and saves both the
index and the quantized model: with the names and calls of TorchRec's retrieval example, in words of our own."""

import argparse
import os
from typing import List, cast  # noqa: UP035

import torch
import torch.distributed as dist
from data.dataloader import get_dataloader  # noqa: TID251  the program's own folder
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from known_weights import print_losses, set_known_weights
from modules.two_tower import ExactIndex, TwoTower, TwoTowerTrainTask
from torch import nn
from torchrec import inference as trec_infer
from torchrec.datasets.movielens import DEFAULT_RATINGS_COLUMN_NAMES
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.inference.state_dict_transform import state_dict_gather, state_dict_to_device
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def train(num_embeddings, embedding_dim, layer_sizes, learning_rate, batch_size, num_iterations, save_dir):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend=backend)
    names = DEFAULT_RATINGS_COLUMN_NAMES[:2]
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature_name}",
            embedding_dim=embedding_dim,
            num_embeddings=num_embeddings,
            feature_names=[feature_name],
        )
        for feature_name in names
    ]
    two_tower_model = TwoTower(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        layer_sizes=layer_sizes,
        device=device,
    )
    task = TwoTowerTrainTask(two_tower_model)
    fused_params = {"learning_rate": learning_rate, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    sharders = cast(
        List[ModuleSharder[nn.Module]],  # noqa: UP006
        [EmbeddingBagCollectionSharder(fused_params=fused_params)],
    )
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device.type)
    ).collective_plan(module=task, sharders=sharders, pg=dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=task, device=device, plan=plan, sharders=sharders)
    set_known_weights(model)
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.Adam(params, lr=learning_rate)
    )
    loader = get_dataloader(
        batch_size=batch_size, num_embeddings=num_embeddings, pin_memory=backend == "nccl", seed=rank
    )
    iterator = iter(loader)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    losses = []
    for _ in range(num_iterations):
        try:
            loss, _, _ = pipeline.progress(iterator)
            losses.append(loss.item())
        except StopIteration:
            break

    checkpoint_pg = dist.new_group(backend="gloo")
    cpu_state_dict = state_dict_to_device(model.state_dict(), pg=checkpoint_pg, device=torch.device("cpu"))
    two_tower_cpu = TwoTower(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        layer_sizes=layer_sizes,
    )
    task_cpu = TwoTowerTrainTask(two_tower_cpu)
    if rank == 0:
        task_cpu = task_cpu.to_empty(device="cpu")
    state_dict_gather(cpu_state_dict, task_cpu.state_dict())
    dist.barrier()

    rows = [0.0, 0.0]
    if rank == 0:
        index = ExactIndex()
        kjt = KeyedJaggedTensor(
            keys=names,
            values=torch.arange(num_embeddings),
            lengths=torch.tensor([0] * num_embeddings + [1] * num_embeddings),
        )
        with torch.no_grad():
            items = two_tower_cpu.candidate_proj(two_tower_cpu.ebc(kjt)[names[1]])
        index.add(items)
        rows = [items.double().mean().item(), items.double().square().mean().item()]
        if save_dir is not None:
            quantized = trec_infer.modules.quantize_embeddings(task_cpu, dtype=torch.qint8, inplace=True)
            torch.save(quantized.state_dict(), f"{save_dir}/model.pt")
            torch.save(index.rows, f"{save_dir}/index.pt")
    print_losses(losses=losses, items=rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir")
    args = parser.parse_args()
    train(400, 16, [16, 8], 0.01, 32, 12, args.save_dir)


if __name__ == "__main__":
    main()
