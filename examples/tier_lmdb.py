"""A backing of one's own: rows that are not on the device lie in LMDB, or in a dict where lmdb is not installed.

pip install lmdb; python examples/tier_lmdb.py

A plain file (`Tier(below="file")`) reads and writes rows many times as fast; this is for rows that must lie in a store
that is there already. A backing is four functions, see `shardwise.embeddings.tiers.Backing`.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ShardingEnv,
    Topology,
    apply_optimizer_in_backward,
)
from shardwise.planner import ParameterConstraints
from shardwise.planner.layout import Tier

ROWS, SLOTS, STEPS = 5000, 1000, 20


class KeyValues(Protocol):
    """A store of bytes by their keys."""

    def get_many(self, keys: list[bytes]) -> Iterator[tuple[bytes, bytes]]: ...

    def put_many(self, pairs: Iterable[tuple[bytes, bytes]]) -> None: ...

    def close(self) -> None: ...


class LmdbValues:
    """Values in LMDB. Nothing is synced: what lies below a table is scratch, and a run goes on from its checkpoint."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        lmdb: Any = importlib.import_module("lmdb")
        self._lmdb = lmdb.open(str(folder), map_size=most_bytes, sync=False, writemap=True, lock=False)

    def get_many(self, keys: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        with self._lmdb.begin() as reads:
            yield from reads.cursor().getmulti(keys)

    def put_many(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        with self._lmdb.begin(write=True) as writes:
            writes.cursor().putmulti([*pairs])

    def close(self) -> None:
        self._lmdb.close()


class DictValues:
    """The same in a dict."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def get_many(self, keys: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        return ((key, self._values[key]) for key in keys if key in self._values)

    def put_many(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._values.update(pairs)

    def close(self) -> None:
        self._values.clear()


class StoredRecords:
    """The backing: a record is what a row has, weights and optimizer states, as bytes that mean nothing here."""

    def __init__(self, values: KeyValues) -> None:
        self._values = values
        self.rows_read = self.rows_written = 0

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Rows [n], ascending and distinct, into out [n, record_bytes]; rows that were never written are zeros."""
        places = {key_of(row): place for place, row in enumerate(rows.tolist())}
        out.zero_()
        for key, value in self._values.get_many([*places]):
            out[places[key]] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self.rows_read += len(places)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Keep records [n, record_bytes] of rows [n]."""
        pairs = zip(map(key_of, rows.tolist()), (record.numpy().tobytes() for record in records), strict=True)
        self._values.put_many(pairs)
        self.rows_written += rows.numel()

    def grow(self, rows: int) -> None:
        """Rows that were never written need no room."""

    def close(self) -> None:
        self._values.close()


def key_of(row: int) -> bytes:
    """Bytes whose order is that of the rows: neighbours lie side by side."""
    return row.to_bytes(8, "big")


def train(tier: Tier | None) -> list[Tensor]:
    """Outputs of some steps of a table, of which some rows are on the device, or all."""
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 16, "item", feature_names=["item"])])
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    constraints = {"item": ParameterConstraints(tier=tier)}
    planner = EmbeddingShardingPlanner(Topology(world_size=1, compute_device="cpu"), constraints=constraints)
    plan = planner.plan(ebc, [EmbeddingBagCollectionSharder()])
    model = DistributedModelParallel(ebc, env=ShardingEnv.from_local(world_size=1, rank=0), plan=plan)
    outputs = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        # some rows are asked for often, most now and then
        ids = (ROWS * torch.rand(256, generator=draw) ** 3).long()
        pooled = model(KeyedJaggedTensor(["item"], ids, lengths=torch.full((64,), 4))).values()
        outputs.append(pooled.detach().clone())
        pooled.square().sum().backward()
    return outputs


def main() -> None:
    backings = []
    with tempfile.TemporaryDirectory() as folder:

        def below(table: str, rows: int, record_bytes: int) -> StoredRecords:
            if importlib.util.find_spec("lmdb") is None:
                print("lmdb is not installed: rows lie in a dict")
                values: KeyValues = DictValues()
            else:
                # LMDB keeps pages of 4 KB, and old ones while a write is under way
                values = LmdbValues(Path(folder) / table, 4 * rows * (record_bytes + 64) + (1 << 24))
            backings.append(StoredRecords(values))
            return backings[-1]

        outputs = train(Tier(slots=SLOTS, max_slots=1.0, below=below))
        backing = backings[0]
        print(f"{SLOTS} of {ROWS} rows on the device; read {backing.rows_read}, written {backing.rows_written}")
        backing.close()
    whole = train(None)
    print("same bits as with all rows on the device:", all(map(torch.equal, outputs, whole)))


if __name__ == "__main__":
    main()
