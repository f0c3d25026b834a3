"""Saves checkpoints into a store, goes on from the newest one, and removes them; any URL that fsspec knows will do.

python examples/recipes/object_storage.py
python examples/recipes/object_storage.py s3://bucket/try
"""

from __future__ import annotations

import sys

import torch

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    checkpoint,
)


def model() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(1000, 16, "item", feature_names=["clicked"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    return ebc


def train(ebc: EmbeddingBagCollection, steps: range) -> float:
    loss = torch.zeros(())
    for step in steps:
        ids = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(step))
        batch = KeyedJaggedTensor(["clicked"], ids, lengths=torch.full((32,), 2))
        loss = (ebc(batch).values() - 1).square().mean()
        loss.backward()
    return float(loss.detach())


def main(folder: str) -> None:
    # a text with a scheme is a place in a store, any other a path
    place = checkpoint.locate(folder)
    ebc = model()
    for step in (10, 20, 30):
        train(ebc, range(step - 10, step))
        # written while training goes on; the next save waits for it
        saving = checkpoint.save(place, ebc, step=step, keep_last=2, asynchronous=True)
    saving.wait()
    print(f"kept: {[path.name for path in checkpoint.steps(place)]}")
    loss = train(ebc, range(30, 40))

    newest = checkpoint.latest(place)
    assert newest is not None
    other = model()
    step = checkpoint.load(newest, other).step
    print(f"{newest}: step {step}, problems: {checkpoint.verify(newest)}")
    print(f"goes on as if nothing had happened: {train(other, range(step, 40)) == loss}")

    best = checkpoint.reshard(place, str(place / "two_ranks"), world_size=2, plan="row_wise")
    print(f"for two ranks: {[file.name for file in checkpoint.read_manifest(best).files]}")
    for path in [*checkpoint.steps(place), best]:
        checkpoint.remove(path)
    print(f"left: {checkpoint.steps(place)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://bucket/runs/7")
