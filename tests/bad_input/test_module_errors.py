"""Faults of reference/faults.md met by the modules: what is said, that no row changes, and that the next batch works.

Numbers in the ids of tests are those of that list. A fault is raised in its own step on the CPU; on CUDA the guard
masks the update and `check()` raises.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from jagged_batches import kjt, pooled, tables_of
from kernel_inputs import UPDATES, assert_close, torch_device
from torch import Tensor, nn

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    GradientCheckMode,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
)

FATAL, WARNING, IGNORE = BoundsCheckMode.FATAL, BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE
EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
# two features of three samples: bags [0:2], [2:2], [2:4] and [4:5], [5:8], [8:8]
IDS = [5, 0, 1, 2, 2, 0, 1, 2]
OFFSETS = [0, 2, 2, 4, 5, 8, 8]


def bag_configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(6, 4, "user", feature_names=["u"]),
        EmbeddingBagConfig(3, 4, "item", feature_names=["i"], pooling=PoolingType.MEAN),
    ]


def row_configs() -> list[EmbeddingConfig]:
    return [EmbeddingConfig(6, 4, "user", feature_names=["u"]), EmbeddingConfig(3, 4, "item", feature_names=["i"])]


def plain(device: torch.device, mode: BoundsCheckMode = FATAL) -> nn.Module:
    return EmbeddingBagCollection(bag_configs(), device=device, policy=LookupPolicy(mode))


def fused(
    device: torch.device, mode: BoundsCheckMode = FATAL, gradients: GradientCheckMode = GradientCheckMode.IGNORE
) -> nn.Module:
    return FusedEmbeddingBagCollection(
        bag_configs(), torch.optim.Adagrad, {"lr": 1.0}, False, device, policy=LookupPolicy(mode, gradients)
    )


def rows(device: torch.device, mode: BoundsCheckMode = FATAL) -> nn.Module:
    return EmbeddingCollection(row_configs(), device, policy=LookupPolicy(mode))


def fused_rows(
    device: torch.device, mode: BoundsCheckMode = FATAL, gradients: GradientCheckMode = GradientCheckMode.IGNORE
) -> nn.Module:
    return FusedEmbeddingCollection(
        row_configs(), RowWiseAdagrad, {"lr": 1.0}, device, policy=LookupPolicy(mode, gradients)
    )


MODULES = {"bags": plain, "fused bags": fused, "rows": rows, "fused rows": fused_rows}
EVERY_MODULE = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def batch(
    device: torch.device, ids: Any = IDS, offsets: list[int] | None = None, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    ends = torch.tensor(OFFSETS if offsets is None else offsets, device=device)
    return KeyedJaggedTensor(["u", "i"], torch.tensor(ids, dtype=dtype, device=device), offsets=ends)


def with_id(position: int, bad: int) -> list[int]:
    return [bad if i == position else value for i, value in enumerate(IDS)]


def values_of(out: Any) -> Tensor:
    return torch.cat([jagged.values() for jagged in out.values()]) if isinstance(out, dict) else out.values()


def step(module: Any, features: KeyedJaggedTensor) -> None:
    """A training step; what is wrong with the batch is raised here wherever it runs."""
    values_of(module(features)).sum().backward()
    module.check()


def refuses(module: Any, features: KeyedJaggedTensor, kind: type[Exception], message: str) -> None:
    """The fault has this message to the letter, nothing changed, and a good batch trains."""
    before = tables_of(module)
    state = {k: v.clone() for s in module.fused_optimizer().state_dict()["state"].values() for k, v in s.items()}
    with pytest.raises(kind) as caught:
        step(module, features)
    assert str(caught.value.args[0]) == message
    for name, table in before.items():
        assert torch.equal(tables_of(module)[name], table)
    for values in module.fused_optimizer().state_dict()["state"].values():
        assert all(torch.equal(value, state[name]) for name, value in values.items())
    for param in module.parameters():
        param.grad = None
    good = batch(features.device())
    step(module, good)
    assert values_of(module(good)).isfinite().all()
    if state:
        assert not torch.equal(tables_of(module)["user"], before["user"])
    else:
        assert all(param.grad is not None for param in module.parameters())


USER, ITEM = "feature 'u' (table 'user')", "feature 'i' (table 'item')"
PADDING = "; if the rest is padding, say so: KeyedJaggedTensor(..., capacity=8)"
BAD_IDS = {
    "1 num_embeddings": (0, 6, f"{USER}, sample 0: id 6 is outside [0, 6)"),
    "1 of another table": (7, 3, f"{ITEM}, sample 1: id 3 is outside [0, 3)"),
    "2 minus one": (3, -1, f"{USER}, sample 2: id -1 is outside [0, 6)"),
    "2 lowest": (4, -(2**63), f"{ITEM}, sample 0: id -9223372036854775808 is outside [0, 3)"),
    "3 above int32": (5, 2**31 + 1, f"{ITEM}, sample 1: id 2147483649 is outside [0, 3)"),
}
BAD_OFFSETS = {
    "6 start": ([1, 2, 2, 4, 5, 8, 8], "offsets must start at 0, got 1"),
    "7 decreasing": ([0, 2, 1, 4, 5, 8, 8], f"{USER}, sample 1: offsets must not decrease, got 2 and then 1"),
    "7 between features": ([0, 2, 2, 4, 3, 8, 8], f"{ITEM}, sample 0: offsets must not decrease, got 4 and then 3"),
    "8 short": ([0, 2, 2, 4, 5, 7, 7], f"offsets end at 7 but there are 8 ids (last feature: {ITEM}){PADDING}"),
    "8 long": ([0, 2, 2, 4, 5, 8, 9], f"offsets end at 9 but there are 8 ids (last feature: {ITEM})"),
}


@EVERYWHERE
@EVERY_MODULE
@pytest.mark.parametrize(("position", "bad", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
def test_1_2_3_an_id_outside_its_table(where: torch.device, make: Any, position: int, bad: int, message: str) -> None:
    refuses(make(where), batch(where, with_id(position, bad)), IndexError, message)


@EVERYWHERE
def test_3_int32_ids_are_ids(where: torch.device) -> None:
    module = fused(where)
    refuses(
        module, batch(where, with_id(3, 6), dtype=torch.int32), IndexError, f"{USER}, sample 2: id 6 is outside [0, 6)"
    )
    step(module, batch(where, dtype=torch.int32))


@EVERYWHERE
@EVERY_MODULE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_5_ids_of_another_type(device: str, make: Any, dtype: torch.dtype) -> None:
    where, name = torch_device(device), str(dtype).removeprefix("torch.")
    features = batch(where, [0, 1, 1, 0, 1, 0, 1, 0], dtype=dtype)
    refuses(make(where), features, TypeError, f"feature ids must be int32 or int64, got {name}")


@EVERYWHERE
@EVERY_MODULE
@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
def test_6_7_8_offsets_out_of_order(where: torch.device, make: Any, offsets: list[int], message: str) -> None:
    refuses(make(where), batch(where, offsets=offsets), ValueError, message)


@EVERYWHERE
def test_the_first_fault_is_the_one_that_is_named(where: torch.device) -> None:
    ids = with_id(2, 77)
    ids[6] = -5
    refuses(fused(where), batch(where, ids), IndexError, f"{USER}, sample 2: id 77 is outside [0, 6)")


CONSTRUCTORS: dict[str, tuple[Callable[[], object], str]] = {
    "10 lengths of too few bags": (
        lambda: KeyedJaggedTensor(["u", "i"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0])),
        "3 bags is not a multiple of 2 keys ['u', 'i']",
    ),
    "11 duplicate keys": (
        lambda: KeyedJaggedTensor(["u", "u"], torch.tensor([1]), lengths=torch.tensor([1, 0])),
        "keys must be unique, repeated: ['u']",
    ),
    "12 weights of another length": (
        lambda: KeyedJaggedTensor(["u"], torch.tensor([1, 2]), torch.ones(3), lengths=torch.tensor([2])),
        "weights must be as many as values: got shape [3] for 2 values",
    ),
    "9 lengths of another sum": (
        lambda: KeyedJaggedTensor.from_lengths_sync(["u"], torch.tensor([1, 2]), torch.tensor([3])),
        "lengths sum to 3, values has 2: key 'u', sample 0 ends at 3",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_9_10_11_12_batches_that_cannot_be_made(name: str) -> None:
    make, message = CONSTRUCTORS[name]
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


@EVERYWHERE
@EVERY_MODULE
def test_11_missing_and_unknown_keys(where: torch.device, make: Any) -> None:
    missing = kjt({"u": [[1]], "other": [[0]]}, device=where)
    refuses(make(where), missing, KeyError, "features ['i'] are not in the batch, which has ['u', 'other']")
    # a key that no table has is no fault, and neither are its ids
    step(make(where), kjt({"other": [[10**9]], "u": [[1]], "i": [[2]]}, device=where))


def test_12_weights_are_missing_or_the_batch_is_none() -> None:
    weighted = EmbeddingBagCollection(bag_configs(), is_weighted=True)
    with pytest.raises(ValueError, match="This collection is weighted: the batch must carry per-id weights"):
        weighted(batch(torch.device("cpu")))
    for module in (weighted, rows(torch.device("cpu"))):
        with pytest.raises(TypeError, match="takes a KeyedJaggedTensor, got Tensor"):
            module(torch.tensor([1]))


def test_features_of_several_batch_sizes_are_refused_by_name() -> None:
    uneven = KeyedJaggedTensor(
        ["u", "i"], torch.tensor([1, 2, 0]), lengths=torch.tensor([1, 1, 1]), stride_per_key_per_rank=[[2], [1]]
    )
    with pytest.raises(ValueError, match=r"one batch size for all features, got \[2, 1\] for \['u', 'i'\]"):
        plain(torch.device("cpu"))(uneven)


@EVERYWHERE
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_13_a_weight_that_is_no_number_stays_in_its_bag(where: torch.device, bad: float) -> None:
    module = EmbeddingBagCollection(bag_configs(), True, where)
    weights = torch.ones(8, device=where)
    weights[0] = bad
    features = batch(where)
    features._weights = weights
    out = module(features).values()
    assert not out[0, :4].isfinite().any()
    assert out[1:].isfinite().all() and out[:, 4:].isfinite().all()


@EVERYWHERE
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("mode", [GradientCheckMode.RAISE, GradientCheckMode.SKIP])
def test_13_a_weight_that_is_no_number_trains_nothing(
    device: str, where: torch.device, bad: float, mode: GradientCheckMode
) -> None:
    """It scales the gradient of its row, which went into the table unseen: only the output's gradient was checked."""
    policy = LookupPolicy(gradient_check=mode)
    module = FusedEmbeddingBagCollection(bag_configs(), torch.optim.Adagrad, {"lr": 1.0}, True, where, policy=policy)
    before = tables_of(module)
    for position, message in ((3, f"{USER}, sample 2"), (7, f"{ITEM}, sample 1")):
        weights = torch.ones(8, device=where)
        weights[position] = bad
        features = KeyedJaggedTensor(
            ["u", "i"], torch.tensor(IDS, device=where), weights, offsets=torch.tensor(OFFSETS, device=where)
        )
        out = module(features).values()
        if mode is GradientCheckMode.SKIP:
            out.backward(torch.ones_like(out))
        else:
            # on CUDA it waits for the device, and names the tables
            message = (
                "tables user, item" if device == "cuda" else f"{message}: the weight of an id is {bad}; nothing changed"
            )
            with pytest.raises(FloatingPointError, match=re.escape(message)):
                out.backward(torch.ones_like(out))
                module(batch_with_weights(where))
        for name, table in before.items():
            assert torch.equal(tables_of(module)[name], table)
    out = module(batch_with_weights(where)).values()
    out.backward(torch.ones_like(out))
    assert not torch.equal(tables_of(module)["user"], before["user"])


def batch_with_weights(device: torch.device) -> KeyedJaggedTensor:
    """A good batch; the weight that lies past its last bag is nobody's."""
    ids = torch.tensor([*IDS, 0], device=device)
    weights = torch.tensor([1.0] * 8 + [float("nan")], device=device)
    return KeyedJaggedTensor(["u", "i"], ids, weights, offsets=torch.tensor(OFFSETS, device=device), capacity=9)


EMPTY = {
    "14 batch of 0": {"u": [], "i": []},
    "16 a feature without ids": {"u": [[], [], []], "i": [[1], [], [2]]},
    "17 no ids at all": {"u": [[], []], "i": [[], []]},
}


@EVERYWHERE
@EVERY_MODULE
@pytest.mark.parametrize("bags", EMPTY.values(), ids=EMPTY.keys())
def test_14_15_16_17_19_empty_is_an_ordinary_size(
    where: torch.device, make: Any, bags: dict[str, list[list[int]]]
) -> None:
    """Bags of nothing are zeros, averaged or not; rows that nobody named do not move."""
    module = make(where)
    before = tables_of(module)
    out = module(kjt(bags, device=where))
    if isinstance(out, dict):
        assert [len(jagged.values()) for jagged in out.values()] == [sum(map(len, bags["u"])), sum(map(len, bags["i"]))]
    else:
        assert_close(out.values(), pooled(bag_configs(), before, bags))
    values_of(out).sum().backward()
    module.check()
    assert torch.equal(tables_of(module)["user"], before["user"])
    assert torch.equal(tables_of(module)["item"][0], before["item"][0])
    step(module, batch(where))
    assert all(table.isfinite().all() for table in tables_of(module).values())


@pytest.mark.parametrize("samples", [0, 2])
def test_18_no_tables_and_no_features(samples: int) -> None:
    for module in (EmbeddingBagCollection([]), FusedEmbeddingBagCollection([], torch.optim.SGD, {"lr": 0.1})):
        assert module(kjt({"u": [[1]] * samples})).values().shape == (samples, 0)
        assert module(KeyedJaggedTensor.empty()).values().shape == (0, 0)
    for collection in (EmbeddingCollection([]), FusedEmbeddingCollection([], torch.optim.SGD, {"lr": 0.1})):
        assert collection(kjt({"u": [[1]] * samples})) == {}


@EVERYWHERE
@pytest.mark.parametrize("dim", [1, 3, 1023, 4096])
def test_24_every_width(where: torch.device, dim: int) -> None:
    tables = [EmbeddingBagConfig(4, dim, "w", feature_names=["u"]), EmbeddingBagConfig(3, 8, "x", feature_names=["i"])]
    module = FusedEmbeddingBagCollection(tables, RowWiseAdagrad, {"lr": 1.0}, device=where)
    before = tables_of(module)
    bags = {"u": [[1, 3, 3], []], "i": [[0], [2]]}
    out = module(kjt(bags, device=where)).values()
    assert_close(out, pooled(tables, before, bags))
    out.backward(torch.ones_like(out))
    expected = before["w"].clone()
    # one step against a gradient of ones, or of twos, is a step of lr in every column
    expected[[1, 3]] -= 1.0
    assert_close(tables_of(module)["w"], expected, 1e-5)
    refuses_width = kjt({"u": [[4]], "i": [[0]]}, device=where)
    with pytest.raises(IndexError, match=r"feature 'u' \(table 'w'\), sample 0: id 4 is outside \[0, 4\)"):
        step(module, refuses_width)


@EVERYWHERE
@pytest.mark.parametrize("dim", [1, 4])
def test_25_tables_of_one_row(where: torch.device, dim: int) -> None:
    tables = [
        EmbeddingBagConfig(1, dim, "one", feature_names=["u"]),
        EmbeddingBagConfig(1, dim, "mean", feature_names=["i"], pooling=PoolingType.MEAN),
    ]
    module = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.5}, device=where)
    before = tables_of(module)
    bags = {"u": [[0] * 40, []], "i": [[0, 0, 0], [0]]}
    out = module(kjt(bags, device=where)).values()
    assert_close(out, pooled(tables, before, bags))
    out.backward(torch.ones_like(out))
    after = tables_of(module)
    assert_close(after["one"], before["one"] - 0.5 * 40)
    assert_close(after["mean"], before["mean"] - 0.5 * 2)
    with pytest.raises(IndexError, match=r"feature 'i' \(table 'mean'\), sample 1: id 1 is outside \[0, 1\)"):
        step(module, kjt({"u": [[0], []], "i": [[0], [0, 1]]}, device=where))


@EVERYWHERE
@pytest.mark.parametrize("make", [fused, fused_rows], ids=["fused bags", "fused rows"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_28_a_gradient_that_is_no_number_trains_nothing(
    device: str, where: torch.device, make: Any, bad: float
) -> None:
    """The step is left out, or raises with a table's name; rows and states stay as they were, and the next trains."""
    for mode, bounds in product((GradientCheckMode.SKIP, GradientCheckMode.RAISE), (FATAL, IGNORE)):
        module = make(where, bounds, mode)
        step(module, batch(where))
        before = tables_of(module)
        states = [v.clone() for s in module.fused_optimizer().state_dict()["state"].values() for v in s.values()]
        values = values_of(module(batch(where)))
        grad = torch.ones_like(values)
        grad[1, -1] = bad
        if mode is GradientCheckMode.SKIP:
            values.backward(grad)
        else:
            with pytest.raises(FloatingPointError, match=r"tables user, item|feature '[ui]' \(table '(user|item)'\)"):
                values.backward(grad)
                # on CUDA nobody waits for the device: the second lookup at the latest tells
                module(batch(where))
                module(batch(where))
        assert all(torch.equal(table, before[name]) for name, table in tables_of(module).items())
        now = [v for s in module.fused_optimizer().state_dict()["state"].values() for v in s.values()]
        assert all(map(torch.equal, now, states))
        step(module, batch(where))
        assert not torch.equal(tables_of(module)["user"], before["user"])


def rounded(where: torch.device, seed: int) -> dict[str, Tensor]:
    """Tables of fp16 and bf16 after three steps, rounded stochastically."""
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(6, 5, "user", DataType.FP16, ["u"]),
        EmbeddingBagConfig(3, 8, "item", DataType.BF16, ["i"]),
    ]
    module = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 1e-3, "seed": seed}, device=where)
    for _ in range(3):
        step(module, batch(where))
    return tables_of(module)


@EVERYWHERE
def test_31_stochastic_rounding_follows_its_seed(where: torch.device) -> None:
    """The same seed gives the same bits, whatever torch's own generators are at; another seed gives others."""
    first, other = rounded(where, 7), rounded(where, 8)
    torch.rand(1000)
    again = rounded(where, 7)
    for name, table in first.items():
        assert torch.equal(again[name], table)
        assert not torch.equal(other[name], table)


@EVERYWHERE
@EVERY_MODULE
def test_32_the_same_run_twice_has_the_same_bits(where: torch.device, make: Any) -> None:
    """Outputs, gradients, tables and states; the rows of a batch are hit by up to 50 ids, in two levels of sums."""
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        module, results = make(where), []
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 3, (100,), generator=generator)
            features = KeyedJaggedTensor(["u", "i"], ids, offsets=torch.tensor([0, 30, 60, 60, 62, 99, 100])).to(where)
            values = values_of(module(features))
            values.backward(torch.randn(values.shape, generator=generator).to(where))
            results.append(values.detach().clone())
        results += tables_of(module).values()
        results += [v.clone() for s in module.fused_optimizer().state_dict()["state"].values() for v in s.values()]
        runs.append(results + [param.grad for param in module.parameters() if param.grad is not None])
    assert all(map(torch.equal, *runs))
    assert len(runs[0]) == len(runs[1]) >= 7


@EVERYWHERE
@EVERY_MODULE
@pytest.mark.parametrize("mode", [WARNING, IGNORE])
def test_a_bad_id_counts_as_no_id(device: str, where: torch.device, make: Any, mode: BoundsCheckMode) -> None:
    """It adds nothing, and nothing is trained in its place; a mean still divides by the number of ids given."""
    module, twin = make(where, mode), make(where)
    twin.load_state_dict(module.state_dict())
    features = batch(where, [5, 99, 1, 2, 2, 0, -7, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = module(features)
        values_of(out).sum().backward()
        # on CUDA the warning waits for the device
        module.check()
    messages = [str(warning.message) for warning in caught if "outside" in str(warning.message)]
    message = f"{USER}, sample 0: id 99 is outside [0, 6); it counts as no id"
    assert messages == ([message] if mode is WARNING else [])

    tables = tables_of(twin)
    if isinstance(out, dict):
        nothing = torch.zeros(1, 4, device=where)
        user, item = tables["user"], tables["item"]
        assert torch.equal(out["u"].values(), torch.cat([user[[5]], nothing, user[[1, 2]]]))
        assert torch.equal(out["i"].values(), torch.cat([item[[2, 0]], nothing, item[[2]]]))
    else:
        left = pooled(bag_configs(), tables, {"u": [[5], [], [1, 2]], "i": [[2], [0, 2], []]})
        left[1, 4:] *= 2 / 3
        assert_close(out.values(), left)
    # rows 0, 3 and 4 of the user table were named by nobody: not by 99, not by -7
    assert torch.equal(tables_of(module)["user"][[0, 3, 4]], tables["user"][[0, 3, 4]])
    if make in (fused, fused_rows):
        assert (tables_of(module)["user"][[1, 2, 5]] != tables["user"][[1, 2, 5]]).all()


@EVERY_MODULE
@pytest.mark.parametrize("mode", [WARNING, IGNORE])
@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
def test_offsets_out_of_order_raise_in_every_mode(
    make: Any, mode: BoundsCheckMode, offsets: list[int], message: str
) -> None:
    """WARNING and IGNORE speak of ids. IGNORE looked at nothing: wrong bags in silence, or torch complained."""
    where = torch.device("cpu")
    refuses(make(where, mode), batch(where, with_id(0, 99), offsets=offsets), ValueError, message)


def test_26_ids_on_another_device_than_the_tables() -> None:
    module = EmbeddingBagCollection(bag_configs(), device="meta")
    with pytest.raises(ValueError, match="ids are on cpu, the tables on meta"):
        module(batch(torch.device("cpu")))
