"""Batches of a fixed capacity: what lies past the last bag changes nothing, forward or backward, and is never checked.

The padding here is garbage on purpose: ids that every table has, ids of none, and weights that are NaN.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from jagged_batches import draw, gradient_of, kjt, tables_of, upstream
from kernel_inputs import (
    CASES,
    UPDATES,
    Case,
    Inputs,
    assert_same_bits,
    crossed,
    inputs,
    optimizer,
    per_device,
    per_rule,
    torch_device,
    update_args,
    upstream as gradient_for,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise import (
    BoundsCheckMode,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    GradientCheckMode,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import DataType
from shardwise.kernels import check_ids, fused_update, new_guard, per_id_weight_gradient, pooled_lookup, sequence_lookup
from shardwise.kernels.transpose import levels_for

EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
GARBAGE = (1, -1, 2**62, -(2**63), 99)


def garbage(like: Tensor) -> Tensor:
    """Ids that nobody asked for, in the dtype of `like`."""
    info = torch.iinfo(like.dtype)
    return torch.tensor([min(max(value, info.min), info.max) for value in GARBAGE], dtype=like.dtype).to(like.device)


def with_padding(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with a capacity beyond its ids."""
    values, weights = features.values(), features.weights_or_none()
    if weights is not None:
        weights = torch.cat([weights, weights.new_full((len(GARBAGE),), float("nan"))])
    return KeyedJaggedTensor(
        features.keys(),
        torch.cat([values, garbage(values)]),
        weights,
        features.lengths(),
        capacity=values.shape[0] + len(GARBAGE),
    )


# The batch.


def two(**given: Any) -> KeyedJaggedTensor:
    """Bags [1, 2] and [] of a, [3] and [] of b, and two values that no bag owns."""
    weights = torch.tensor([0.1, 0.2, 0.3, float("nan"), float("nan")])
    bags: dict[str, Any] = {"lengths": torch.tensor([2, 0, 1, 0]), **given}
    return KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, -1, 7]), weights, **bags)


def test_a_batch_with_a_capacity_has_the_bags_of_one_without() -> None:
    for given in ({}, {"lengths": None, "offsets": torch.tensor([0, 2, 2, 3, 3])}):
        batch = two(capacity=5, **given)
        assert (batch.capacity(), batch.values().shape, batch.weights().shape) == (5, (5,), (5,))
        assert (batch.offsets().tolist(), batch.length_per_key()) == ([0, 2, 2, 3, 3], [2, 1])
        assert batch.offset_per_key() == [0, 2, 3]
        for bags in (batch.to_dict(), {key: batch[key] for key in ("a", "b")}):
            assert {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in bags.items()} == {
                "a": [[1, 2], []],
                "b": [[3], []],
            }
        assert "-1" not in str(batch) and "nan" not in str(batch)
        assert "stride=2, capacity=5, values=" in repr(batch)


def test_copies_keep_the_capacity_and_pieces_have_no_padding() -> None:
    batch = two(capacity=5)
    copies = (batch.to("cpu"), batch.to("meta"), copy.copy(batch), copy.deepcopy(batch))
    for copied in (*copies, pickle.loads(pickle.dumps(batch)), batch.sync().to("cpu"), *batch.split([2])):
        assert (copied.capacity(), copied.values().shape[0]) == (5, 5)
    joined = KeyedJaggedTensor.concat([two(capacity=5), KeyedJaggedTensor.empty(is_weighted=True)])
    for copied in (batch.permute([0, 1]), joined, KeyedJaggedTensor.from_jt_dict(batch.to_dict())):
        assert (copied.capacity(), copied.values().tolist(), copied.keys()) == (None, [1, 2, 3], ["a", "b"])
        assert copied.weights().isfinite().all()
    assert [piece.values().tolist() for piece in batch.split([1, 1])] == [[1, 2], [3]]
    assert [piece.capacity() for piece in batch.split([1, 1])] == [None, None]


def test_a_capacity_is_the_number_of_values_and_bags_end_within_it() -> None:
    ids = torch.tensor([1, 2, 3])
    for message, attempt in {
        "capacity 5 needs as many values, padding included: got 3": lambda: KeyedJaggedTensor(
            ["a"], ids, lengths=torch.tensor([3]), capacity=5
        ),
        "capacity must be an integer >= 0, got -1": lambda: KeyedJaggedTensor(
            ["a"], ids, lengths=torch.tensor([3]), capacity=-1
        ),
        r"weights must be as many as values: got shape \[2\] for 3 values": lambda: KeyedJaggedTensor(
            ["a"], ids, torch.ones(2), torch.tensor([2]), capacity=3
        ),
        "lengths sum to 4, values has 3: key 'a', sample 1 ends at 4": lambda: KeyedJaggedTensor.from_lengths_sync(
            ["a"], ids, torch.tensor([2, 2]), capacity=3
        ),
        r"key 'a', sample 1: length -1 \(offsets go from 2 to 1\)": lambda: KeyedJaggedTensor(
            ["a"], ids, offsets=torch.tensor([0, 2, 1]), capacity=3, validate="full"
        ),
        # and without a capacity nothing is padding
        "lengths sum to 2, values has 3: 1 left after key 'a'": lambda: KeyedJaggedTensor.from_lengths_sync(
            ["a"], ids, torch.tensor([2])
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            attempt()
    full = KeyedJaggedTensor.from_offsets_sync(["a"], ids, torch.tensor([0, 3]), capacity=3)
    assert full.length_per_key() == [3]
    nobody = KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([], dtype=torch.int64), capacity=3)
    assert (nobody.stride(), nobody.length_per_key(), nobody["a"].values().tolist()) == (0, [0], [])


# The ops.


def longer(batch: Inputs) -> Inputs:
    """The batch with garbage past its last offset."""
    p = batch.per_id_weights
    return replace(
        batch,
        indices=torch.cat([batch.indices, garbage(batch.indices)]),
        per_id_weights=None if p is None else torch.cat([p, p.new_full((len(GARBAGE),), float("nan"))]),
    )


SOME = ("batch 0", "empty feature", "dim 5", "shared table", "mixed dims", "weighted mean", "int32 both", "bf16 table")


@pytest.mark.parametrize(("device", "case"), per_device([case for case in CASES if case.name in SOME]))
def test_every_op_gives_the_same_bits_with_padding(device: str, case: Case) -> None:
    """Lookups, their gradients and the id check; rows, gradients and weights' gradients of padding are zeros."""
    batch = inputs(case, torch_device(device))
    weights, grad = batch.weights, gradient_for(batch)
    ids = batch.indices.shape[0]
    results = []
    for padded_batch in (batch, longer(batch)):
        out = [pooled_lookup(*padded_batch.lookup)]
        q = per_id_weight_gradient(
            grad, weights, padded_batch.indices, padded_batch.offsets, padded_batch.features, padded_batch.dims
        )
        assert (q[ids:] == 0).all()
        out.append(q[:ids])
        for pooling, upstream_grad in {padded_batch.pooling: grad, **rows_of(padded_batch)}.items():
            out.append(
                torch.ops.shardwise.lookup_gradient(
                    weights, upstream_grad, padded_batch.indices, padded_batch.offsets, padded_batch.per_id_weights,
                    padded_batch.features, padded_batch.dims, padded_batch.segments, pooling,
                )
            )  # fmt: skip
        if len(set(padded_batch.dims)) == 1:
            rows = sequence_lookup(
                weights,
                padded_batch.indices,
                padded_batch.offsets,
                padded_batch.features,
                padded_batch.dims[0],
                padded_batch.segments,
            )
            assert rows.shape[0] == padded_batch.indices.shape[0] and (rows[ids:] == 0).all()
            out.append(rows[:ids])
        guard = new_guard(weights.device)
        check_ids(
            padded_batch.indices,
            padded_batch.offsets,
            padded_batch.features,
            guard,
            names=padded_batch.names,
            padded=True,
        )
        results.append([*out, guard])
    assert_same_bits(results[1], results[0])


def rows_of(batch: Inputs) -> dict[str, Tensor]:
    """A gradient of each row of a sequence lookup, if the tables allow one; that of padding is NaN."""
    if len(set(batch.dims)) != 1:
        return {}
    owned = int(batch.offsets[-1])
    rows = torch.full((batch.indices.shape[0], batch.dims[0]), float("nan"))
    rows[:owned] = upstream(owned, batch.dims[0])
    return {"sequence": rows.to(batch.weights.device)}


@pytest.mark.parametrize(("device", "rule"), per_rule(UPDATES))
def test_an_update_gives_the_same_bits_with_padding(device: str, rule: str) -> None:
    """The padding asks for one more level of sums, of which there is nothing to add."""
    tables = ((9, 8), (6, 3), (4, 8))
    case = Case("capacity", tables, ((0, False), (1, True), (2, False)), batch=5, lengths=(2, 2), weighted=True)
    batch = inputs(case, torch_device(device))
    assert levels_for(batch.indices.shape[0]) < levels_for(longer(batch).indices.shape[0])
    results = []
    for padded_batch in (batch, longer(batch)):
        weights, state = padded_batch.weights.clone(), optimizer(rule, padded_batch, decay="l2")
        for _ in range(2):
            fused_update(*update_args(weights, state, gradient_for(padded_batch), padded_batch))
        results.append([weights, *state.states, state.step])
    assert not torch.equal(results[0][0], batch.weights)
    assert_same_bits(results[1], results[0])


@EVERYWHERE
def test_an_id_check_looks_at_bags_only_and_at_their_end(device: str) -> None:
    batch = inputs(Case("bounds", batch=3, lengths=(2, 2)), torch_device(device))
    names, padded = batch.names, longer(batch)

    def check(checked: Inputs, *, padded: bool = False) -> None:
        guard = new_guard(batch.weights.device)
        check_ids(checked.indices, checked.offsets, checked.features, guard, names=names, padded=padded)
        assert guard.tolist() == new_guard().tolist()

    check(padded, padded=True)
    if device == "cuda":
        return
    with pytest.raises(ValueError, match="offsets end at 6 but there are 11 ids"):
        check(padded)
    beyond = replace(batch, offsets=batch.offsets + torch.tensor([0, 0, 0, 1], device=batch.offsets.device))
    with pytest.raises(ValueError, match="offsets end at 7 but there are 6 ids"):
        check(beyond, padded=True)
    padded.indices[5] = 77
    with pytest.raises(IndexError, match=r"sample 2: id 77 is outside \[0, 20\)"):
        check(padded, padded=True)


# The modules.


def bag_configs(feature: str = "u") -> list[EmbeddingBagConfig]:
    """Three tables of one group, and one of another dtype; two of them share a feature."""
    return [
        EmbeddingBagConfig(6, 4, "user", feature_names=[feature]),
        EmbeddingBagConfig(5, 8, "item", feature_names=["i"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(7, 4, "other", feature_names=["i"]),
    ]


def plain_bags(device: torch.device, **policy: Any) -> nn.Module:
    return EmbeddingBagCollection(bag_configs(), device=device, policy=LookupPolicy(**policy))


def weighted_bags(device: torch.device, **policy: Any) -> nn.Module:
    """Two groups, so that features are picked and permuted."""
    configs = [*bag_configs(), EmbeddingBagConfig(4, 4, "small", feature_names=["w"], data_type=DataType.FP16)]
    return EmbeddingBagCollection(configs, True, device, policy=LookupPolicy(**policy))


def one_group(device: torch.device, **policy: Any) -> nn.Module:
    """Features in the order of the batch: the padded values reach the kernels as they are."""
    configs = [EmbeddingBagConfig(n, 4, f"t{f}", feature_names=[f]) for f, n in (("u", 6), ("i", 5), ("w", 4))]
    return EmbeddingBagCollection(configs, True, device, policy=LookupPolicy(**policy))


def rows(device: torch.device, **policy: Any) -> nn.Module:
    configs = [EmbeddingConfig(n, 4, f"t{f}", feature_names=[f]) for f, n in (("u", 6), ("i", 5), ("w", 4))]
    return EmbeddingCollection(configs, device, need_indices=True, policy=LookupPolicy(**policy))


MODULES = {"bags": plain_bags, "weighted bags": weighted_bags, "one group": one_group, "rows": rows}
RUNS = {
    "dense": (None, torch.int64),
    "dense int32": (None, torch.int32),
    "adam int32": (torch.optim.Adam, torch.int32),
    "rowwise": (RowWiseAdagrad, torch.int64),
}


def batch_of(device: torch.device, step: int, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    bags = draw({"u": 6, "i": 5, "w": 4}, samples=5, seed=step)
    count = sum(len(bag) for feature in bags.values() for bag in feature)
    scale = torch.rand(count, generator=torch.Generator().manual_seed(step)) + 0.5
    return kjt(bags, weights=scale.to(device), dtype=dtype, device=device)


def tensors_of(out: Any) -> list[Tensor]:
    """Values of the output and, of a sequence, its lengths and ids."""
    if not isinstance(out, dict):
        return [out.values()]
    return [part for jt in out.values() for part in (jt.values(), jt.lengths(), jt.weights())]


def trained(
    make: Callable[..., nn.Module], kind: Any, device: torch.device, pad: Callable[..., Any], dtype: torch.dtype
) -> list[Tensor]:
    """All that three steps gave and left behind: outputs, tables or their gradients, states, weights' gradients."""
    torch.manual_seed(0)
    module: Any = make(device, gradient_check=GradientCheckMode.RAISE)
    if kind is not None:
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    results = []
    for step in range(3):
        features = pad(batch_of(device, step, dtype))
        owned = int(features.offsets()[-1])
        scale = features.weights().requires_grad_()
        out = tensors_of(module(features))
        wanted = [output for output in out if output.requires_grad]
        torch.autograd.backward(wanted, [upstream(*output.shape, seed=step).to(device) for output in wanted])
        results += [output.detach() for output in out]
        if scale.grad is not None:
            assert (scale.grad[owned:] == 0).all()
            results.append(scale.grad[:owned])
    module.check()
    results += list(tables_of(module).values())
    results += [gradient_of(param) for param in module.parameters() if kind is None]
    states = module.fused_optimizer().state_dict()["state"]
    return results + [value.clone() for values in states.values() for value in values.values()]


def is_no_extreme(make: str, run: str) -> bool:
    """Neither the module that has all kernels nor the way to train that has fewest."""
    return make != "weighted bags" and run != "dense"


@pytest.mark.parametrize(("device", "make", "run"), crossed(UPDATES, product(MODULES, RUNS), is_no_extreme))
def test_a_collection_trains_to_the_same_bits_with_padding(device: str, make: str, run: str) -> None:
    where, (kind, dtype) = torch_device(device), RUNS[run]
    expected = trained(MODULES[make], kind, where, lambda batch: batch, dtype)
    got = trained(MODULES[make], kind, where, with_padding, dtype)
    assert len(got) == len(expected) >= 3
    for actual, reference in zip(got, expected, strict=True):
        assert actual.shape == reference.shape
        assert_same_bits(actual, reference)


@EVERYWHERE
@pytest.mark.parametrize("mode", BoundsCheckMode)
@pytest.mark.parametrize("make", MODULES)
def test_padding_is_not_checked_and_bags_are(
    device: str, where: torch.device, make: str, mode: BoundsCheckMode
) -> None:
    module: Any = MODULES[make](where, bounds_check=mode)
    features = with_padding(batch_of(where, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # numpy's, of what triton 3.6 interprets
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        module(features)
        module.check()
    too_far = KeyedJaggedTensor(
        features.keys(), features.values(), features.weights(),
        offsets=features.offsets() + torch.tensor([0] * 15 + [99], device=where), capacity=features.capacity(),
    )  # fmt: skip
    if device == "cuda" and mode is BoundsCheckMode.IGNORE:
        return
    with pytest.raises(ValueError, match="offsets end at|lengths sum to"):
        module(too_far)
        module.check()


@EVERYWHERE
@pytest.mark.parametrize("make", MODULES)
def test_a_batch_of_nothing_but_padding(where: torch.device, make: str) -> None:
    module: Any = MODULES[make](where)
    for samples in (0, 2):
        empty = kjt({"u": [[]] * samples, "i": [[]] * samples, "w": [[]] * samples}, device=where)
        features = with_padding(
            KeyedJaggedTensor(empty.keys(), empty.values(), torch.ones(0, device=where), empty.lengths())
        )
        out = tensors_of(module(features))
        torch.autograd.backward(out[0], torch.ones_like(out[0]))
        assert all((output == 0).all() for output in out)
        assert all((gradient_of(param) == 0).all() for param in module.parameters())


def test_one_graph_serves_batches_of_every_size() -> None:
    """Same shapes, other numbers of ids: the compiled step breaks no graph and is not compiled a second time."""
    torch._dynamo.reset()
    where, capacity = torch.device("cpu"), 64
    torch.manual_seed(0)
    module = one_group(where)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    twin: Any = copy.deepcopy(module)
    module(batch_of(where, 0))
    twin(batch_of(where, 0))
    counter = CompileCounterWithBackend("aot_eager")

    def forward(ids: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
        features = KeyedJaggedTensor(["u", "i", "w"], ids, scale, offsets=offsets, capacity=capacity)
        return module(features).values()  # type: ignore[no-any-return]

    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    for step in range(1, 4):
        batch = batch_of(where, step)
        spare = capacity - batch.values().shape[0]
        ids = torch.cat([batch.values(), torch.full((spare,), -1)])
        scale = torch.cat([batch.weights(), torch.full((spare,), float("nan"))])
        out = compiled(ids, batch.offsets(), scale)
        expected = twin(batch).values()
        assert_same_bits(out, expected)
        out.sum().backward()
        expected.sum().backward()
    assert counter.frame_count == 1
    for name, table in tables_of(module).items():
        assert_same_bits(table, tables_of(twin)[name])
