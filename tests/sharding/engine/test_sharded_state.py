"""State dicts of sharded tables: what ranks publish and can load, and TorchRec's `state_dict_transform` of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import fused
from ranks import error_of, run_ranks, world_group
from sharding_mixes import (
    STRATEGIES,
    Mix,
    TableCase,
    batches_of_rank,
    build,
    environment,
    same_tensors,
    shard,
    train,
    train_alone,
)
from sharding_steps import expect_outputs, local_part, local_tensors, train_on
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, ShardingEnv
from shardwise.embeddings import RowWiseAdagrad
from shardwise.jagged import KeyedJaggedTensor
from shardwise.planner.layout import (
    Shard,
    TableOptions,
    column_wise,
    data_parallel,
    row_wise,
)
from shardwise.sharding import ShardedEmbeddingBagCollection
from shardwise.sharding.torchrec.state_dict_transform import (
    state_dict_all_gather_keys,
    state_dict_gather,
    state_dict_to_device,
)

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:Please use DTensor")]

WHOLE_ROWS = TableOptions(reduction="ordered", row_state="table")


def mix_with(strategies: tuple[str, ...] = STRATEGIES, *, pooled: bool = True, exact: bool = False) -> Mix:
    """A table for each strategy; some rows of 7 leave a rank of four without any."""
    options = WHOLE_ROWS if exact else TableOptions()
    return Mix(
        tuple(
            TableCase(name, (5, 12)[n % 2], 8, (f"f{n}",), name, options=options, seed=n + 1)
            for n, name in enumerate(strategies)
        ),
        pooled=pooled,
    )


def whole_of(parts: list[tuple[Any, list[tuple[list[int], Tensor]]]]) -> Tensor:
    """The tensor whose pieces, (offsets, values), all ranks told; each piece of it once."""
    size = parts[0][0]
    whole, times = torch.zeros(size), torch.zeros(size, dtype=torch.int64)
    for rank_size, pieces in parts:
        assert rank_size == size
        for offsets, piece in pieces:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
            whole[place] = piece
            times[place] += 1
    assert bool((times == 1).all())
    return whole


def told(value: Any) -> tuple[Any, list[tuple[list[int], Tensor]]]:
    """Size and local pieces; a plain tensor is rank 0's to tell."""
    if isinstance(value, ShardedTensor):
        pieces = [(list(shard.metadata.shard_offsets), shard.tensor.detach().clone()) for shard in value.local_shards()]
        return tuple(value.metadata().size), pieces
    return tuple(value.shape), [([0] * value.dim(), value.detach().clone())] if dist.get_rank() == 0 else []


def published(mix: Mix, optimizer: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str], Any]:
    model = shard(mix, build(mix, optimizer), environment())
    state, fused = model.state_dict(), model.fused_optimizer.state_dict()
    states = {key: told(value) for values in fused["state"].values() for key, value in values.items()}
    weights = {key: told(value) for key, value in state.items()}
    return weights, states, {key: type(value).__name__ for key, value in state.items()}, fused["param_groups"]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "rows"])
def test_the_pieces_of_all_ranks_are_the_unsharded_state_dict(world: int, pooled: bool) -> None:
    mix = mix_with(pooled=pooled)
    ranks = run_ranks(world, published, mix, "adam")
    alone = build(mix, "adam")
    for weights, _, kinds, groups in ranks:
        assert list(weights) == list(alone.state_dict())
        assert {name for name, kind in kinds.items() if kind == "Tensor"} == {
            name for name in weights if "data_parallel" in name
        }
        # groups do not depend on the rank
        assert groups == ({"params": sorted(alone.state_dict()), "lr": 0.05},)
    for name, value in alone.state_dict().items():
        assert torch.equal(whole_of([weights[name] for weights, *_ in ranks]), value)
    for values in alone.fused_optimizer().state_dict()["state"].values():
        for key, value in values.items():
            parts = [states[key] for _, states, *_ in ranks if key in states]
            if key.endswith("step"):
                assert all(size == (1,) for size, _ in parts)
            else:
                assert whole_of(parts).shape == value.shape


def test_states_per_row_have_the_sizes_of_torchrec() -> None:
    """Of a table cut by columns: rows x column blocks, one block after another."""
    ranks = run_ranks(4, published, mix_with(), "rowwise_adagrad")
    sizes = {key: size for _, states, *_ in ranks for key, (size, _) in states.items()}
    assert sizes == {
        "data_parallel.momentum1": (5,), "table_wise.momentum1": (12,), "row_wise.momentum1": (5,),
        "column_wise.momentum1": (24,), "table_row_wise.momentum1": (5,), "table_column_wise.momentum1": (24,),
        "grid.momentum1": (10,),
    }  # fmt: skip
    for key in sizes:
        whole_of([states[key] for _, states, *_ in ranks if key in states])


def collection(optimizer: type[torch.optim.Optimizer], rows: int = 6) -> EmbeddingBagCollection:
    torch.manual_seed(3)
    tables = [EmbeddingBagConfig(rows, 8, name, feature_names=[name]) for name in "abc"]
    return fused(EmbeddingBagCollection(tables), optimizer)


def sharded_over(
    cuts: dict[str, list[Shard]], env: ShardingEnv | None = None, **options: TableOptions
) -> ShardedEmbeddingBagCollection:
    shards, default = [shard for cut in cuts.values() for shard in cut], (torch.optim.SGD, {"lr": 0.01})
    return ShardedEmbeddingBagCollection(
        collection(RowWiseAdagrad), shards, env or environment(), torch.device("cpu"), default_optimizer=default,
        options=options,
    )  # fmt: skip


EVEN = {
    "a": row_wise("a", 6, 8, [0, 1, 2, 3]),
    "b": column_wise("b", 6, 8, [0, 1, 2, 3]),
    # not the cut of a DTensor: torchrec_names/test_local_shards.py
    "c": row_wise("c", 6, 8, [3, 2, 1, 0]),
}


def test_even_cuts_over_all_ranks_can_be_dtensors() -> None:
    wanted = collection(RowWiseAdagrad).state_dict()
    for kinds, wholes, live in run_ranks(4, placed_as_dtensors):
        assert live
        assert kinds.pop("a.momentum1", "DTensor (Shard(dim=0),)") == "DTensor (Shard(dim=0),)"
        assert kinds.pop("c.momentum1", "DTensor (Shard(dim=0),)") == "DTensor (Shard(dim=0),)"
        assert kinds == {
            # 2, 2, 2 and no rows
            "embedding_bags.a.weight": "DTensor (Shard(dim=0),)",
            "embedding_bags.b.weight": "DTensor (Shard(dim=1),)",
            # its pieces as they lie
            "embedding_bags.c.weight": "DTensor (Shard(dim=0),)",
            "b.momentum1": "DTensor (Shard(dim=0),)",
        }
        for name in ("embedding_bags.a.weight", "embedding_bags.b.weight"):
            assert torch.equal(wholes[name], wanted[name])


def placed_as_dtensors() -> Any:
    sharded = sharded_over(EVEN, ShardingEnv.from_process_group(world_group(), True))
    state = sharded.state_dict()
    states = sharded.fused_optimizer.state_dict()["state"].values()
    kinds = {
        key: f"{type(value).__name__} {getattr(value, 'placements', '')}".strip()
        for values in (state, *states)
        for key, value in values.items()
    }

    def whole() -> dict[str, Tensor]:
        # full_tensor is a collective: every rank asks for the same values
        tensors = sharded.state_dict().items()
        return {name: value.full_tensor().clone() for name, value in tensors if "c" not in name.split(".")}

    before = whole()
    for value in state.values():
        local_part(value).fill_(3.0)
    live = all(bool((param == 3).all()) for param in sharded.parameters())
    # and they load
    sharded.load_state_dict({name: value.clone() for name, value in state.items()})
    sharded.load_state_dict(collection(RowWiseAdagrad).state_dict())
    live = live and same_tensors(before, whole())
    sharded.fused_optimizer.load_state_dict(sharded.fused_optimizer.state_dict())
    return kinds, before, live


def go_on(mix: Mix, optimizer: str) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Load what one process trained for two steps, and train two more."""
    other, alone = build(mix, optimizer), build(mix, optimizer)
    for param in other.parameters():
        param.data.fill_(7.0)
    model = shard(mix, other, environment())
    train(mix, alone, batches_of_rank(mix, range(2), 0, 1), False)
    model.load_state_dict(alone.state_dict())
    model.fused_optimizer.load_state_dict(alone.fused_optimizer().state_dict())
    return train_on(mix, model, range(2, 4)), {name: told(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_training_goes_on_from_the_state_of_one_process_bit_for_bit(optimizer: str) -> None:
    mix = mix_with(exact=True)
    run = train_alone(mix, optimizer, 4)
    ranks = run_ranks(2, go_on, mix, optimizer)
    expect_outputs(mix, run, [outputs for outputs, _ in ranks], range(2, 4))
    for name, value in run.weights.items():
        assert torch.equal(whole_of([state[f"embedding_bags.{name}.weight"] for _, state in ranks]), value), name


def refusals() -> dict[str, str]:
    cuts = ({name: way(name, 6, 8, [0, 1]) for name in "abc"} for way in (column_wise, row_wise))
    model, other = map(sharded_over, cuts)
    whole, longer = collection(RowWiseAdagrad), collection(RowWiseAdagrad, 7)
    before = {name: value.clone() for name, value in local_tensors(model.state_dict()).items()}
    for param in whole.parameters():
        param.data.fill_(5.0)
    errors = {}
    good, c = whole.state_dict(), "embedding_bags.c.weight"
    attempts: dict[str, Callable[[], Any]] = {
        "another plan": lambda: model.load_state_dict({**good, c: other.state_dict()[c]}),
        "other rows": lambda: model.load_state_dict({**good, c: longer.state_dict()[c]}),
        "no tensor": lambda: model.load_state_dict({**good, c: [1.0]}),
        "row states": lambda: model.fused_optimizer.load_state_dict(whole.fused_optimizer().state_dict()),
        "strange name": lambda: model.fused_optimizer.load_state_dict({"state": {"x.weight": {}}}),
    }  # fmt: skip
    for case, attempt in attempts.items():
        errors[case] = error_of(attempt)
        assert same_tensors(before, local_tensors(model.state_dict())), case
    # keys are reported as any module reports them
    odd = {"embedding_bags.a.weight": good["embedding_bags.a.weight"], "odd": torch.ones(1)}
    errors["keys"] = error_of(model.load_state_dict, odd)
    lenient = model.load_state_dict({**good, "odd": torch.ones(1)}, strict=False)
    assert (lenient.missing_keys, lenient.unexpected_keys) == ([], ["odd"])
    assert all(bool((param == 5).all()) for param in model.parameters())
    # by assignment too the tables stay where they are
    places = [param.data_ptr() for param in model.parameters()]
    model.load_state_dict(collection(RowWiseAdagrad).state_dict(), assign=True)
    assert [param.data_ptr() for param in model.parameters()] == places
    assert same_tensors(before, local_tensors(model.state_dict()))
    model.fused_optimizer.resplit = "mean"
    model.fused_optimizer.load_state_dict(whole.fused_optimizer().state_dict())
    return errors


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    for errors in run_ranks(2, refusals):
        expected = {
            "another plan": r"^ValueError: table 'c' \(embedding_bags\.c\.weight\): rank 0 needs \[0, 6\) x \[0, 4\)"
            r" and has \['\[0, 3\) x \[0, 8\)'\] .*another plan.*torch\.distributed\.checkpoint",
            "other rows": r"^RefusedStateError: size mismatch: table 'c' \(embedding_bags\.c\.weight\) has shape"
            r" \(6, 8\), loaded \(7, 8\)$",
            "no tensor": r"^ValueError: table 'c' .* is a tensor of shape \(6, 8\), loaded list$",
            "row states": r"^ValueError: embedding_bags\.a\.weight: state a\.momentum1 has a number for each row"
            r" and column block, \(12,\), loaded one for each whole row, \(6,\): set resplit = 'mean'",
            "strange name": r"^ValueError: .*unexpected \['x\.weight'\]",
            "keys": r'^RuntimeError: .*Missing key.*"embedding_bags\.b\.weight".*Unexpected key.*"odd"',
        }
        assert errors.keys() == expected.keys()
        for case, pattern in expected.items():
            assert re.search(pattern, errors[case], re.DOTALL), errors[case]


def test_one_process_without_a_group_publishes_whole_tables() -> None:
    """Also of a table that is cut by columns: its parts do not lie side by side in memory."""
    cuts = {
        "a": column_wise("a", 6, 8, [0, 0]),
        "b": row_wise("b", 6, 8, [0]),
        "c": row_wise("c", 6, 8, [0]),
    }
    wanted = collection(RowWiseAdagrad).state_dict()
    sharded = sharded_over(cuts, ShardingEnv.from_local(1, 0), a=TableOptions(row_state="table"))
    state = sharded.state_dict()
    assert all(type(value) is Tensor and torch.equal(value, wanted[name]) for name, value in state.items())
    sharded.load_state_dict({name: value + 1 for name, value in wanted.items()})
    assert all(torch.equal(value, wanted[name] + 1) for name, value in sharded.state_dict().items())
    states = sharded.fused_optimizer.state_dict()["state"].values()
    sizes = {key: tuple(value.shape) for values in states for key, value in values.items()}
    assert sizes == {"a.momentum1": (6,), "b.momentum1": (6,), "c.momentum1": (6,)}


def test_a_gradient_moves_with_its_replicated_table() -> None:
    """`.to()` after a backward emptied the parameter before it gave it its gradient, which torch refused."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "a", feature_names=["f"])])
    env = ShardingEnv.from_local(1, 0)
    shards = data_parallel("a", 4, 2, 1)
    model = ShardedEmbeddingBagCollection(
        module, shards, env, torch.device("cpu"), default_optimizer=(torch.optim.SGD, {"lr": 0.1})
    )
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 3, 3]), lengths=torch.tensor([1, 2]))
    model(features).wait().values().sum().backward()
    model.half()
    (parameter,) = model.parameters()
    assert parameter.grad is not None and parameter.dtype == parameter.grad.dtype == torch.float16
    assert parameter.grad.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]


def schedule() -> list[float]:
    # all on rank 0
    model = sharded_over({name: row_wise(name, 6, 8, [0]) for name in "abc"})
    optimizer = model.fused_optimizer
    saved = deepcopy(optimizer.state_dict())
    steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for _ in range(2):
        optimizer.step()
        rates += [group.lr for group in optimizer.groups] or [optimizer.param_groups[0]["lr"]]
        steps.step()
    optimizer.load_state_dict(saved)
    return [*rates, optimizer.param_groups[0]["lr"]]


def test_schedules_and_loaded_rates_reach_tables_and_ranks_without_any() -> None:
    assert run_ranks(2, schedule) == [[0.1, 0.05, 0.1]] * 2


def place(dtensors: bool) -> ShardingEnv:
    return ShardingEnv.from_process_group(world_group(), True) if dtensors else environment()


def state_of(mix: Mix, dtensors: bool) -> dict[str, Any]:
    state = shard(mix, build(mix, "adam"), place(dtensors)).state_dict()
    return {**state, "dense": torch.full((2,), 3.0)}


def gathered(mix: Mix, dtensors: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], set[str]]:
    state = state_of(mix, dtensors)
    whole = {f"embedding_bags.{table.name}.weight": (table.rows, table.dim) for table in mix.tables}
    target = {name: torch.full(size, -7.0, dtype=dtype) for name, size in {"dense": (2,), **whole}.items()}
    state_dict_gather(state, target)
    return target, {type(state[name]).__name__ for name in whole}


@pytest.mark.parametrize(
    ("world", "dtensors", "dtype"), [(1, False, torch.float32), (4, False, torch.float64), (2, True, torch.float32)]
)
def test_a_sharded_state_dict_is_gathered_on_rank_0(world: int, dtensors: bool, dtype: torch.dtype) -> None:
    mix = mix_with()
    if dtensors:
        cut = [TableCase("row_wise", 12, 8, ("a",), "row_wise"), TableCase("column_wise", 5, 8, ("b",), "column_wise")]
        mix = Mix((*mix.tables[:1], *cut))
    alone = build(mix, "adam").state_dict()
    ranks = run_ranks(world, gathered, mix, dtensors, dtype)
    if world > 1:
        assert ("DTensor" if dtensors else "ShardedTensor") in ranks[0][1]
    for rank, (state, _) in enumerate(ranks):
        assert len(state) == len(alone) + 1 and torch.equal(state["dense"], torch.full((2,), 3.0, dtype=dtype))
        for name, weight in alone.items():
            replicated = "data_parallel" in name
            wanted = weight if rank == 0 or replicated else torch.full_like(weight, -7.0)
            assert torch.equal(state[name], wanted.to(dtype)), (rank, name)


def wrong_targets() -> list[str]:
    mix = Mix((TableCase("a", 12, 8, ("a",), "row_wise"),))
    state, errors = state_of(mix, False), []
    name = "embedding_bags.a.weight"
    good = {name: torch.zeros(12, 8)}
    lone: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
        ({**state, name: state[name]}, {name: torch.zeros(12, 4)}),
        ({name: state[name]}, {**good, "lost": torch.zeros(2)}),
        ({**state, "dense": 3}, {**good, "dense": torch.zeros(2)}),
    ]
    for pair in lone:
        # only rank 0 has the fault
        errors.append(error_of(lambda pair=pair: state_dict_gather(*(pair if dist.get_rank() == 0 else (state, good)))))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="ranks differ in what all must share: names to gather, in their order"):
        state_dict_gather({**state, "b": state[name]}, {("b" if dist.get_rank() else name): torch.zeros(12, 8)})
    state_dict_gather(state, good)
    return errors


def test_what_is_wrong_on_rank_0_is_raised_on_all() -> None:
    wrong = "src has shape (12, 8), dst (12, 4)"
    for errors in run_ranks(2, wrong_targets):
        assert wrong in errors[0] and "src has no 'lost'" in errors[1]
        assert "'dense': a tensor is what can be gathered, not int" in errors[2]


def names_and_moves(mix: Mix, dtensors: bool) -> tuple[list[str], dict[str, Any], dict[str, str], set[str]]:
    state, rank = state_of(mix, dtensors), dist.get_rank()
    names = state_dict_all_gather_keys({f"rank{rank}": torch.zeros(1), "b": 1, "a": 2}, world_group())
    moved = state_dict_to_device(state, world_group(), torch.device("cpu"))
    assert list(moved) == sorted(state)
    for name, value in moved.items():
        moved_part, before = local_part(value), local_part(state[name])
        assert moved_part is None or torch.equal(moved_part, before)
    # what only some ranks have: a table on one rank is a ShardedTensor without pieces on the others, as upstream's are
    lone = dict(state)
    if rank:
        del lone["embedding_bags.table_wise.weight"]
    back = state_dict_to_device(lone, world_group(), "cpu")
    # and they load
    model = shard(mix, build(mix, "adam"), place(dtensors))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict({name: value for name, value in back.items() if name != "dense"})
    meta = state_dict_to_device(state, world_group(), "meta")
    places = {str(shard.placement) for shard in meta["embedding_bags.row_wise.weight"].metadata().shards_metadata}
    return (
        names, {name: told(value) for name, value in model.state_dict().items()},
        {name: type(value).__name__ for name, value in back.items()}, places,
    )  # fmt: skip


def test_names_of_all_ranks_and_values_on_a_device() -> None:
    mix = mix_with()
    alone = build(mix, "adam").state_dict()
    ranks = run_ranks(2, names_and_moves, mix, False)
    for names, weights, kinds, places in ranks:
        assert names == ["a", "b", "rank0", "rank1"]
        assert weights.keys() == alone.keys()
        assert kinds["embedding_bags.table_wise.weight"] == kinds["embedding_bags.grid.weight"] == "ShardedTensor"
        assert kinds["dense"] == "Tensor"
        assert places == {"rank:0/meta", "rank:1/meta"}
    for name, weight in alone.items():
        parts = [weights[name] for _, weights, _, _ in ranks]
        assert torch.equal(whole_of(parts), weight), name


def cannot_move() -> list[str]:
    mix = Mix((TableCase("a", 12, 8, ("a",), "row_wise"),))
    errors = []
    dtensor = "embedding_bags.a.weight"
    for dtensors, bad in ((False, {"dense": None}), (True, {dtensor: None}), (False, {"extra": "text"})):
        state = state_of(mix, dtensors)
        if dist.get_rank() == 1:
            state = {name: value for name, value in {**state, **bad}.items() if value is not None}
        errors.append(error_of(state_dict_to_device, state, world_group(), "cpu"))
    return errors


def test_what_cannot_be_moved_is_named_on_all_ranks() -> None:
    extra = "'extra': rank 1 has str, which is no tensor"
    lack = "ranks [1] lack it, and only a ShardedTensor has no piece on a rank"
    assert (
        run_ranks(2, cannot_move)
        == [[f"ValueError: {text}" for text in (f"'dense': {lack}", f"'embedding_bags.a.weight': {lack}", extra)]] * 2
    )
