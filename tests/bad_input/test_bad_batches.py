"""A bad batch has one answer in all kinds of collections: the same exception, or the same output where it may pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    BoundsCheckMode,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    LookupPolicy,
    ShardingEnv,
)
from shardwise.errors import RefusedIndexError
from shardwise.inference import quantize_inference_model
from shardwise.planner import layout
from shardwise.sharding import ParameterSharding, construct_module_sharding_plan, row_wise, table_wise
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection
from shardwise.sharding.quant import QuantEmbeddingBagCollectionSharder

FATAL, WARNING, IGNORE = BoundsCheckMode.FATAL, BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE
CPU = torch.device("cpu")
TABLES = [EmbeddingBagConfig(6, 4, "user", feature_names=["u"]), EmbeddingBagConfig(3, 4, "item", feature_names=["i"])]
# two features of three samples: bags [0:2], [2:2], [2:4] and [4:5], [5:8], [8:8]
IDS, OFFSETS = [5, 0, 1, 2, 2, 0, 1, 2], [0, 2, 2, 4, 5, 8, 8]


def filled(module: nn.Module) -> Any:
    """Row r of a table holds numbers that every format keeps: sums of them tell rows apart."""
    with torch.no_grad():
        for number, table in enumerate(module.parameters()):
            table.copy_(torch.arange(float(table.numel())).view_as(table) + 100 * number)
    return module


def plain(mode: BoundsCheckMode) -> nn.Module:
    return filled(EmbeddingBagCollection(TABLES, policy=LookupPolicy(mode)))  # type: ignore[no-any-return]


def trained(mode: BoundsCheckMode) -> nn.Module:
    module = FusedEmbeddingBagCollection(TABLES, torch.optim.SGD, {"lr": 0.1}, False, CPU, policy=LookupPolicy(mode))
    return filled(module)  # type: ignore[no-any-return]


def sharded(mode: BoundsCheckMode) -> nn.Module:
    shards = [shard for config in TABLES for shard in layout.table_wise(config.name, config.num_embeddings, 4, 0)]
    return ShardedEmbeddingBagCollection(plain(mode), shards, ShardingEnv.from_local(1, 0), CPU, default_optimizer=None)


def quantized(mode: BoundsCheckMode) -> Any:
    return quantize_inference_model(plain(mode), fp_weight_dtype=torch.float32, quantization_dtype=torch.float32)


def quantized_pieces(mode: BoundsCheckMode) -> Any:
    model, sharder = quantized(mode), QuantEmbeddingBagCollectionSharder()
    generators: Any = {"user": row_wise(), "item": table_wise(1)}
    plan: dict[str, ParameterSharding] = construct_module_sharding_plan(model, generators, sharder, 2, 2, "cpu")
    return sharder.shard(model, plan, ShardingEnv.from_local(2, 0))


KINDS: dict[str, Callable[[BoundsCheckMode], Any]] = {
    "plain": plain, "trained": trained, "sharded": sharded, "quantized": quantized,
    "quantized pieces": quantized_pieces,
}  # fmt: skip
EVERY_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


def batch(ids: list[Any], offsets: list[int], *, padded: bool, dtype: torch.dtype) -> KeyedJaggedTensor:
    """The batch; a padded one has two more ids, which are nobody's and lie in no table."""
    values = torch.tensor([*ids, 99, -9] if padded else ids, dtype=dtype)
    capacity = values.shape[0] if padded else None
    return KeyedJaggedTensor(["u", "i"], values, offsets=torch.tensor(offsets), capacity=capacity)


def answer(module: Any, features: KeyedJaggedTensor) -> tuple[Tensor | type[Exception], list[str]]:
    """The output or the type of the error, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: Tensor | type[Exception]
        try:
            found = module(features).values().detach().float()
        except Exception as error:
            found = type(error)
    return found, [str(warning.message) for warning in caught if "counts as no id" in str(warning.message)]


USER = "feature 'u' (table 'user')"
LEFT_OUT = [6, 7]
# ids, offsets, the error where it is none of ids, and what WARNING says
BATCHES: dict[str, tuple[list[int], list[int], type[Exception] | None, str]] = {
    "good": (IDS, OFFSETS, None, ""),
    "start": (IDS, [1, 2, 2, 4, 5, 8, 8], ValueError, ""),
    "decreasing": (IDS, [0, 2, 1, 4, 5, 8, 8], ValueError, ""),
    "decreasing between features": (IDS, [0, 2, 2, 4, 3, 8, 8], ValueError, ""),
    "short": (IDS, [0, 2, 2, 4, 5, 7, 7], ValueError, ""),
    "long": (IDS, [0, 2, 2, 4, 5, 8, 11], ValueError, ""),
    "negative": ([5, 0, -1, 2, 2, 0, 1, 2], OFFSETS, None, f"{USER}, sample 2: id -1 is outside [0, 6)"),
    "too large": ([5, 6, 1, 2, 2, 0, 1, 2], OFFSETS, None, f"{USER}, sample 0: id 6 is outside [0, 6)"),
    "both": ([5, -1, 1, 2, 2, 0, 1, 2], [0, 2, 1, 4, 5, 8, 8], ValueError, ""),
}


@EVERY_KIND
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("mode", [FATAL, WARNING, IGNORE])
def test_a_batch_has_one_answer_in_all_kinds_of_collections(make: Any, mode: BoundsCheckMode, padded: bool) -> None:
    """Quantized tables in pieces looked at nothing under IGNORE: wrong bags in silence where offsets decrease."""
    module, wanted_by = make(mode), filled(EmbeddingBagCollection(TABLES, policy=LookupPolicy(IGNORE)))
    for name, (ids, offsets, error, message) in BATCHES.items():
        # in a padded batch offsets may end before the ids
        error = None if padded and name == "short" else error
        error = error or (RefusedIndexError if message and mode is FATAL else None)
        found, warned = answer(module, batch(ids, offsets, padded=padded, dtype=torch.int64))
        assert warned == ([f"{message}; it counts as no id"] if message and mode is WARNING else []), name
        if error is not None:
            assert found is error, name
            continue
        # bags of the ids that lie in their tables, by hand
        bags = [
            [id for id in ids[begin:end] if 0 <= id < (6 if number < 3 else 3)]
            for number, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False))
        ]
        tables = [table.detach() for table in wanted_by.parameters()]
        sums = torch.stack([tables[number // 3][bag].sum(0) for number, bag in enumerate(bags)])
        assert isinstance(found, Tensor) and torch.equal(found, torch.cat([sums[:3], sums[3:]], dim=1)), name


@EVERY_KIND
@pytest.mark.parametrize("mode", [FATAL, WARNING, IGNORE])
def test_ids_that_are_no_integers_are_refused_in_all_kinds_of_collections(make: Any, mode: BoundsCheckMode) -> None:
    found, _ = answer(make(mode), batch([0.0] * 8, OFFSETS, padded=False, dtype=torch.float32))
    assert found is TypeError
