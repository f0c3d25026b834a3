# type: ignore  # torchrec is served at run time
"""Times a plain and a fused collection of DLRM's tables: with the names and calls of TorchRec's benchmark, in words of
our own, and small enough for a test."""

import argparse

import ebc_benchmarks_utils
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops import EmbeddingLocation
from known_weights import print_losses, set_known_weights
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

# shaped like DLRM's: a few large, many small
ROWS = [900, 36, 17, 74, 20, 3, 71, 14, 62, 800]


def configs(embedding_dim):
    return [
        EmbeddingBagConfig(
            name=f"ebc_{idx}", embedding_dim=embedding_dim, num_embeddings=rows, feature_names=[f"ebc_{idx}_feat_1"]
        )
        for idx, rows in enumerate(ROWS)
    ]


def get_ebc_comparison(tables, device, epochs):
    ebc = EmbeddingBagCollection(tables=tables, device=device)
    optimizer = torch.optim.SGD(ebc.parameters(), lr=0.02)
    fused_ebc = FusedEmbeddingBagCollection(
        tables=tables, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.02}, device=device
    )
    set_known_weights(ebc)
    set_known_weights(fused_ebc)
    dataset = ebc_benchmarks_utils.get_random_dataset(16, 3, 8, tables)
    losses = []
    plain, _ = ebc_benchmarks_utils.train(ebc, optimizer, dataset, device, epochs, losses)
    fused, _ = ebc_benchmarks_utils.train(fused_ebc, None, dataset, device, epochs, losses)
    print(f"ebc_time = {plain} sec, fused_ebc_time = {fused} sec, speedup = {plain / fused}")
    return losses


def get_fused_ebc_uvm_time(tables, device, location, epochs):
    fused_ebc = FusedEmbeddingBagCollection(
        tables=tables,
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.02},
        device=device,
        location=location,
    )
    set_known_weights(fused_ebc)
    dataset = ebc_benchmarks_utils.get_random_dataset(16, 3, 8, tables)
    losses = []
    seconds, _ = ebc_benchmarks_utils.train(fused_ebc, None, dataset, device, epochs, losses)
    print(f"fused_ebc_time = {seconds} sec at {location}")
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu_only", action="store_true")
    parser.add_argument("--mode", default="ebc_comparison_dlrm", choices=["ebc_comparison_dlrm", "fused_ebc_uvm"])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu_only else "cpu")
    if args.mode == "ebc_comparison_dlrm":
        print_losses(losses=[loss for dim in (8, 12) for loss in get_ebc_comparison(configs(dim), device, epochs=2)])
    else:
        print_losses(losses=get_fused_ebc_uvm_time(configs(8), device, EmbeddingLocation.MANAGED, epochs=2))


if __name__ == "__main__":
    main()
