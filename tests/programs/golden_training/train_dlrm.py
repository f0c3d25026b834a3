# type: ignore  # torchrec is served at run time
"""Trains a DLRM on random batches with rowwise Adagrad in backward and compressed exchanges: with the names and calls
of TorchRec's golden training example, in words of our own. Started by torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from known_weights import print_losses, set_known_weights
from torch.distributed.elastic.multiprocessing.errors import record
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


def train(num_embeddings, embedding_dim, batch_size, steps, learning_rate, forward, backward):
    dist.init_process_group(backend="gloo")
    device = torch.device("cpu")
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature_name}",
            embedding_dim=embedding_dim,
            num_embeddings=num_embeddings,
            feature_names=[feature_name],
        )
        for feature_name in DEFAULT_CAT_NAMES
    ]
    train_model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=len(DEFAULT_INT_NAMES),
            dense_arch_layer_sizes=[32, embedding_dim],
            over_arch_layer_sizes=[32, 1],
            dense_device=device,
        )
    )
    apply_optimizer_in_backward(RowWiseAdagrad, train_model.model.sparse_arch.parameters(), {"lr": learning_rate})
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(
            qcomms_config=QCommsConfig(forward_precision=forward, backward_precision=backward)
        )
    )
    model = DistributedModelParallel(module=train_model, device=device, sharders=[sharder])
    set_known_weights(model)
    non_fused_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=learning_rate),
    )
    pipeline = TrainPipelineSparseDist(model, non_fused_optimizer, device)
    batches = RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=batch_size,
        hash_size=num_embeddings,
        ids_per_feature=1,
        num_dense=len(DEFAULT_INT_NAMES),
        # the example has none: batches of a seed are the same on both sides
        manual_seed=dist.get_rank(),
    )
    iterator, losses = iter(batches), []
    for _ in range(steps):
        loss, _, _ = pipeline.progress(iterator)
        losses.append(loss.item())
    print_losses(losses=losses)


@record
def main():
    assert "LOCAL_RANK" in os.environ, "start me by torchrun"
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_embeddings", type=int, default=500)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--forward", default="FP16", choices=CommType.__members__)
    parser.add_argument("--backward", default="BF16", choices=CommType.__members__)
    args = parser.parse_args()
    train(args.num_embeddings, 16, 32, args.steps, 0.01, CommType[args.forward], CommType[args.backward])


if __name__ == "__main__":
    main()
