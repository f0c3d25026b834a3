"""A table eight times as large as the device may hold trains on generated clicks, to the bits of a table that fits.

python examples/tiers.py                    rows that are not on the device lie in the host's memory
python examples/tiers.py --file /nvme/rows  in a scratch file in this folder

"The device" is a budget here, so that it runs on any machine. Of the table `item` as many rows are on the device as the
budget has room for, weights and optimizer states together; all others come and go while batches train. A bar shows the
hit rate and the bytes of each step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from shardwise import (
    DLRM,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    Tier,
    apply_optimizer_in_backward,
    cache_metrics,
    cache_regret,
    in_backward_optimizer_filter,
    tiered,
    trace_caches,
)
from shardwise.data import ClickFeature, Clicks
from shardwise.models import auc

CPU = torch.device("cpu")
ROWS, DIM, BATCH = 80_000, 32, 256
# weights, and one number of rowwise Adagrad
ROW_BYTES = 4 * DIM + 4
BUDGET_BYTES = ROWS * ROW_BYTES // 8


@dataclass(frozen=True)
class Trained:
    """What is left of a run."""

    losses: list[Tensor]
    logits: Tensor
    labels: Tensor
    tables: dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", metavar="FOLDER", help="of a scratch file of the rows that are not on the device")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    data = Clicks(
        features=[ClickFeature("user", 2000, skew=0.8), ClickFeature("item", ROWS, skew=1.05, min_ids=1, max_ids=8)],
        train_samples=args.steps * BATCH, evaluate_samples=8 * BATCH,
    )  # fmt: skip
    tier = Tier(slots=BUDGET_BYTES // ROW_BYTES, below="file" if args.file else "ram", folder=args.file)
    print(f"item: {ROWS * ROW_BYTES / 1e6:.1f} MB, the device has room for {BUDGET_BYTES / 1e6:.1f} MB of it: {tier}")

    model = tiered(built(), {"item": tier})
    trace_caches(model)
    small = train(model, data)
    print(model.get_submodule("model.sparse_arch.embedding_bag_collection"))
    for table, metrics in cache_metrics(model).items():
        print(f"{table}: {metrics}; {metrics.bytes_moved / 1e6:.1f} MB moved, {metrics.stalls} prefetches had no room")
        print(f"{table}: regret {cache_regret(model)[table]:.1%}, what a cache that knows the future has more")
    whole = train(built(), data)
    for what, run in (("with a tier", small), ("all on the device", whole)):
        score = auc(run.logits, run.labels)
        print(f"{what}: loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, test AUC {score:.4f}")
    print("losses of all steps are equal, to the bit:", all(map(torch.equal, small.losses, whole.losses)))
    print("scores of the test are equal, to the bit:", torch.equal(small.logits, whole.logits))
    rows_equal = all(torch.equal(small.tables[name], rows) for name, rows in whole.tables.items())
    print("all rows of the tables are equal, to the bit:", rows_equal)


def built() -> DLRMTrain:
    """A DLRM whose tables train in the backward."""
    torch.manual_seed(0)
    rows = {"user": 2000, "item": ROWS}
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(count, DIM, name, feature_names=[name]) for name, count in rows.items()]
    )
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.05})
    return DLRMTrain(DLRM(ebc, 8, [32, DIM], [16, 1]))


def train(model: nn.Module, data: Clicks) -> Trained:
    """An epoch, and scores of samples that it did not see."""
    dense = torch.optim.Adam(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.01)
    # rows of two batches come while this one trains; of 16 it is known what they will need, so that it stays
    pipeline = PrefetchTrainPipelineSparseDist(model, dense, CPU, ahead=16, prefetch=2)
    batches, losses, last = data.train(BATCH), [], cache_metrics(model)
    with tqdm(total=data.train_samples // BATCH, unit="step") as bar:
        for _ in range(data.train_samples // BATCH):
            loss, _, _ = pipeline.progress(batches)
            losses.append(loss)
            now = cache_metrics(model, since=last)
            bar.set_postfix({
                table: f"{step.hit_rate:.0%} hits, {step.bytes_moved / 1e6:.2f} MB" for table, step in now.items()
            })  # fmt: skip
            bar.update()
            last = cache_metrics(model)
    model.eval()
    with torch.no_grad():
        scored = [model(batch)[1][1:] for batch in data.evaluate(BATCH)]
    logits, labels = (torch.cat(parts) for parts in zip(*scored, strict=True))
    tables = {name: rows_of(value) for name, value in model.state_dict().items() if "embedding_bags" in name}
    return Trained(losses, logits, labels, tables)


def rows_of(value: Tensor) -> Tensor:
    """All rows of a table: of one with a tier the state has them as the shards of one rank."""
    local = getattr(value, "local_shards", None)
    return value if local is None else torch.cat([shard.tensor for shard in local()])


if __name__ == "__main__":
    main()
