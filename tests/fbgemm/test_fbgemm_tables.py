"""FBGEMM's modules of tables as ours train: beside `torch.nn.functional.embedding_bag` and each optimizer's formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from shardwise.embeddings import WeightDecayMode
from shardwise.embeddings.optim.fbgemm_types import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SparseType,
)
from shardwise.fbgemm.tables import SplitTableBatchedEmbeddingBagsCodegen
from shardwise.perf.evidence.fbgemm.tables import CHECKS, OURS, apart, check_all, compare, make
from shardwise.perf.evidence.parity import CASES

# (rows, dim) of each table, and the table of each feature
SHAPES, FEATURES = [(9, 8), (5, 4), (7, 8)], [0, 1, 1, 2]
LR, EPS, DECAY, STEPS = 0.1, 0.1, 0.05, 5
B1, B2, ETA, MOMENTUM = 0.9, 0.99, 0.01, 0.9
Formula = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def tables(**settings: Any) -> Any:
    """A module on the CPU with weights from -1 to 1."""
    settings = {"embedding_specs": SHAPES, "feature_table_map": FEATURES, **settings}
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    settings["embedding_specs"] = [(*shape, *place) for shape in settings["embedding_specs"]]
    module = SplitTableBatchedEmbeddingBagsCodegen(**settings)
    torch.manual_seed(0)
    module.init_embedding_weights_uniform(-1, 1)
    return module


def batch(seed: int, *, samples: int = 6, features: int = 4, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and weights; some bags are empty, some rows come up often."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (features * samples,), generator=g)
    ids = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids, offsets, torch.rand(len(ids), generator=g) + 0.5


def look_up(
    weights: list[Tensor], of: list[int], ids: Tensor, offsets: Tensor, scales: Tensor | None, mode: str
) -> Tensor:
    """What the module computes, feature by feature."""
    samples = (len(offsets) - 1) // len(of)
    parts = []
    for f, t in enumerate(of):
        bounds = offsets[f * samples : (f + 1) * samples + 1]
        here = slice(int(bounds[0]), int(bounds[-1]))
        if mode == "none":
            parts.append(weights[t][ids[here]])
            continue
        given = None if scales is None else scales[here].to(weights[t].dtype)
        if mode == "mean" and given is not None:
            # torch has no weighted mean
            lengths = bounds.diff()
            given = given / lengths.repeat_interleave(lengths)
        how = "sum" if given is not None else mode
        bags = bounds - bounds[0]
        parts.append(
            embedding_bag(ids[here], weights[t], bags, mode=how, per_sample_weights=given, include_last_offset=True)
        )
    return torch.cat(parts, 0 if mode == "none" else 1)


def upstream(out: Tensor) -> Tensor:
    return ((torch.arange(out.numel()) * 7 % 11) / 8 - 0.5).view(out.shape)


def _adam(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int, v: Tensor) -> Tensor:
    s["exp_avg"] = B1 * s["exp_avg"] + (1 - B1) * g
    s["exp_avg_sq"] = B2 * s["exp_avg_sq"] + (1 - B2) * v
    root = (s["exp_avg_sq"] / (1 - B2**step)).sqrt() + EPS
    return s["exp_avg"] / (1 - B1**step) / (root if root.dim() == 2 else root[:, None])


def adam(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    return w - LR * (_adam(w, g, s, step, g * g) + DECAY * w)


def partial_adam(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    return w - LR * (_adam(w, g, s, step, (g * g).mean(1)) + DECAY * w)


def _lamb(w: Tensor, direction: Tensor) -> Tensor:
    direction = direction + DECAY * w
    return w - LR * w.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True) * direction


def lamb(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    return _lamb(w, _adam(w, g, s, step, g * g))


def partial_lamb(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    return _lamb(w, _adam(w, g, s, step, (g * g).mean(1)))


def lars(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    length, slope = w.norm(dim=1, keepdim=True), g.norm(dim=1, keepdim=True)
    rate = torch.where(slope > 0, LR * ETA * length / (slope + DECAY * length), LR)
    s["momentum_buffer"] = MOMENTUM * s["momentum_buffer"] + rate * (g + DECAY * w)
    return w - s["momentum_buffer"]


def sgd(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    return w - LR * g


def adagrad(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    s["sum"] = s["sum"] + g * g
    return w - LR * g / (s["sum"].sqrt() + EPS)


def rowwise_adagrad(w: Tensor, g: Tensor, s: dict[str, Tensor], step: int) -> Tensor:
    g = g + DECAY * w
    s["sum"] = s["sum"] + (g * g).mean(1)
    return w - LR * g / (s["sum"].sqrt()[:, None] + EPS)


# optimizer -> its formula on the rows of a batch, and the names and kinds of its states
OPTIMIZERS: dict[OptimType, tuple[Formula, dict[str, str]]] = {
    OptimType.SGD: (sgd, {}),
    OptimType.EXACT_SGD: (sgd, {}),
    OptimType.EXACT_ADAGRAD: (adagrad, {"sum": "element"}),
    OptimType.ROWWISE_ADAGRAD: (rowwise_adagrad, {"sum": "row"}),
    OptimType.EXACT_ROWWISE_ADAGRAD: (rowwise_adagrad, {"sum": "row"}),
    OptimType.ADAM: (adam, {"exp_avg": "element", "exp_avg_sq": "element"}),
    OptimType.PARTIAL_ROWWISE_ADAM: (partial_adam, {"exp_avg": "element", "exp_avg_sq": "row"}),
    OptimType.LAMB: (lamb, {"exp_avg": "element", "exp_avg_sq": "element"}),
    OptimType.PARTIAL_ROWWISE_LAMB: (partial_lamb, {"exp_avg": "element", "exp_avg_sq": "row"}),
    OptimType.LARS_SGD: (lars, {"momentum_buffer": "element"}),
}
ROWWISE = (OptimType.ROWWISE_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD)


def settings_of(optimizer: OptimType) -> dict[str, Any]:
    settings = {
        "optimizer": optimizer, "learning_rate": LR, "eps": EPS, "beta1": B1, "beta2": B2, "eta": ETA,
        "momentum": MOMENTUM,
    }  # fmt: skip
    if OPTIMIZERS[optimizer][0] not in (sgd, adagrad):
        settings["weight_decay"] = DECAY
    if optimizer in ROWWISE:
        settings["weight_decay_mode"] = WeightDecayMode.L2
    return settings


def states_of(module: SplitTableBatchedEmbeddingBagsCodegen) -> list[dict[str, Tensor]]:
    return module.get_optimizer_state() or [{} for _ in module.dims]


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_five_steps_follow_the_formula(optimizer: OptimType, weighted: bool, pooling: str) -> None:
    """Rows that no index names, and their states, do not change."""
    formula, states = OPTIMIZERS[optimizer]
    shapes = [(rows, 8) for rows, _ in SHAPES] if pooling == "none" else SHAPES
    module = tables(embedding_specs=shapes, pooling_mode=PoolingMode.from_str(pooling), **settings_of(optimizer))
    weights = [table.double() for table in module.split_embedding_weights()]
    held = [
        {name: torch.zeros(w.shape if kind == "element" else w.shape[:1]).double() for name, kind in states.items()}
        for w in weights
    ]
    for step in range(1, STEPS + 1):
        ids, offsets, scales = batch(step)
        given = scales.clone().requires_grad_() if weighted else None
        out = module(ids, offsets, given)
        leaves = [w.clone().requires_grad_() for w in weights]
        # nothing is scaled where nothing is pooled
        wanted = scales.double().requires_grad_() if weighted and pooling != "none" else None
        expected = look_up(leaves, FEATURES, ids, offsets, wanted, pooling)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        grad = upstream(out)
        torch.autograd.backward(out, grad)
        torch.autograd.backward(expected, grad.double())
        if wanted is not None and given is not None:
            torch.testing.assert_close(given.grad.double(), wanted.grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
        samples = (len(offsets) - 1) // len(FEATURES)
        for t, (w, leaf, s) in enumerate(zip(weights, leaves, held, strict=True)):
            bounds = [
                (int(offsets[f * samples]), int(offsets[(f + 1) * samples])) for f in range(4) if FEATURES[f] == t
            ]
            rows = torch.cat([ids[a:b] for a, b in bounds]).unique()
            of_rows = {name: state[rows] for name, state in s.items()}
            g = torch.zeros_like(w) if leaf.grad is None else leaf.grad
            w[rows] = formula(w[rows], g[rows], of_rows, step)
            for name, state in of_rows.items():
                s[name][rows] = state
    for t, (table, state) in enumerate(zip(module.split_embedding_weights(), states_of(module), strict=True)):
        torch.testing.assert_close(table.double(), weights[t], rtol=1e-5, atol=1e-5)
        assert list(state) == list(states)
        for name, value in state.items():
            torch.testing.assert_close(value.double(), held[t][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "make_optimizer"),
    [
        (OptimType.EXACT_SGD, lambda p: torch.optim.SGD(p, lr=LR)),
        (OptimType.EXACT_ADAGRAD, lambda p: torch.optim.Adagrad(p, lr=LR, eps=EPS)),
        (
            OptimType.ADAM,
            lambda p: torch.optim.AdamW(p, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=DECAY),
        ),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_batches_that_name_every_row_train_as_torch_does(optimizer: OptimType, make_optimizer: Any) -> None:
    module = tables(embedding_specs=[(5, 8)], feature_table_map=[0], **settings_of(optimizer))
    weights = torch.nn.Parameter(module.split_embedding_weights()[0].clone())
    dense = make_optimizer([weights])
    for step in range(STEPS):
        ids = torch.cat([torch.arange(5), torch.tensor([step % 5, 3])])
        offsets = torch.tensor([0, 2, 2, 7])
        for out in (module(ids, offsets), look_up([weights], [0], ids, offsets, None, "sum")):
            torch.autograd.backward(out, upstream(out) + 0.3)
        dense.step()
        dense.zero_grad()
    torch.testing.assert_close(module.split_embedding_weights()[0], weights.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", [SparseType.FP16, SparseType.BF16], ids=str)
@pytest.mark.parametrize("optimizer", [OptimType.EXACT_SGD, OptimType.ADAM], ids=str)
def test_tables_of_16_bits_train(optimizer: OptimType, precision: SparseType) -> None:
    settings = {**settings_of(optimizer), "weights_precision": precision, "stochastic_rounding": False}
    module, exact = tables(**settings), tables(**settings_of(optimizer))
    for own, other in zip(exact.split_embedding_weights(), module.split_embedding_weights(), strict=True):
        own.copy_(other)
    for step in range(STEPS):
        ids, offsets, _ = batch(step)
        for each in (module, exact):
            out = each(ids, offsets)
            assert out.dtype == torch.float32
            torch.autograd.backward(out, upstream(out))
    dtype = precision.as_dtype()
    for own, other in zip(module.split_embedding_weights(), exact.split_embedding_weights(), strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.float(), other, rtol=0, atol=STEPS * 2 * torch.finfo(dtype).eps)


def test_stochastic_rounding_is_the_default_and_repeats() -> None:
    ids, offsets, _ = batch(1)
    runs = []
    for rounds in (True, True, False):
        module = tables(weights_precision=SparseType.FP16, learning_rate=1e-3, stochastic_rounding=rounds)
        out = module(ids, offsets)
        torch.autograd.backward(out, upstream(out))
        runs.append(module.weights_host.detach().clone())
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("output", [SparseType.FP16, SparseType.BF16], ids=str)
def test_the_output_has_the_type_that_is_asked_for(output: SparseType) -> None:
    ids, offsets, scales = batch(1)
    out = tables(output_dtype=output)(ids, offsets, scales)
    assert out.dtype == output.as_dtype()
    torch.testing.assert_close(out.float(), tables()(ids, offsets, scales), rtol=1e-2, atol=1e-2)
    torch.autograd.backward(out, upstream(out).to(out.dtype))


def test_gradients_are_cut_where_that_is_asked_for() -> None:
    module, other = tables(gradient_clipping=True, max_gradient=0.25, learning_rate=LR), tables(learning_rate=LR)
    ids, offsets, _ = batch(1)
    out = module(ids, offsets)
    torch.autograd.backward(out, upstream(out))
    torch.autograd.backward(other(ids, offsets), upstream(out).clamp(-0.25, 0.25))
    assert torch.equal(module.weights_host, other.weights_host)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_without_an_optimizer_weights_have_a_sparse_gradient(pooling: str) -> None:
    shapes = [(9, 8), (5, 8), (7, 8)]
    module = tables(optimizer=OptimType.NONE, embedding_specs=shapes, pooling_mode=PoolingMode.from_str(pooling))
    ids, offsets, scales = batch(2)
    leaves = [table.clone().requires_grad_() for table in module.split_embedding_weights()]
    given = None if pooling == "none" else scales.clone().requires_grad_()
    wanted = None if pooling == "none" else scales.clone().requires_grad_()
    out = module(ids, offsets, given, total_unique_indices=len(ids))
    expected = look_up(leaves, FEATURES, ids, offsets, wanted, pooling)
    torch.testing.assert_close(out, expected)
    torch.autograd.backward(out, upstream(out))
    torch.autograd.backward(expected, upstream(out))
    weights = dict(module.named_parameters())["weights_host"]
    assert weights.shape == (21, 8) and weights.grad is not None and weights.grad.is_sparse
    assert len(weights.grad._indices()[0].unique()) == weights.grad._nnz()
    dense = torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    torch.testing.assert_close(weights.grad.to_dense(), dense)
    if given is not None and wanted is not None:
        torch.testing.assert_close(given.grad, wanted.grad)
    before = weights.detach().clone()
    torch.optim.SGD([weights], lr=1.0).step()
    torch.testing.assert_close(torch.cat(module.split_embedding_weights()), before - dense)


@pytest.mark.parametrize("sizes", [[[2, 1], [0, 4], [3, 3], [1, 0]], [[2, 0], [1, 1], [0, 2], [2, 0]], [[3]] * 4])
def test_features_may_have_batch_sizes_of_their_own(sizes: list[list[int]]) -> None:
    """The output is one vector: of rank after rank the rows of feature after feature."""
    total = sum(map(sum, sizes))
    ids, offsets, scales = batch(3, samples=total, features=1)
    module = tables(learning_rate=LR)
    weights = [table.clone().requires_grad_() for table in module.split_embedding_weights()]
    bags = iter(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for f, of_feature in enumerate(sizes):
        for r, count in enumerate(of_feature):
            spans = [next(bags) for _ in range(count)]
            rows[r, f] = [(weights[FEATURES[f]][ids[a:b]] * scales[a:b, None]).sum(0) for a, b in spans]
    expected = torch.cat([row for r in range(len(sizes[0])) for f in range(4) for row in rows[r, f]])
    out = module(ids, offsets, scales, batch_size_per_feature_per_rank=sizes)
    torch.testing.assert_close(out, expected)
    torch.autograd.backward(out, upstream(out))
    torch.autograd.backward(expected, upstream(out))
    for table, weight in zip(module.split_embedding_weights(), weights, strict=True):
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(table, weight.detach() - LR * grad)


def test_weights_have_gradients_of_the_features_that_want_them() -> None:
    ids, offsets, scales = batch(1)
    grads = []
    for wanted in (None, torch.tensor([1, 0, 0, 1])):
        leaf = scales.clone().requires_grad_()
        out = tables()(ids, offsets, leaf, wanted)
        torch.autograd.backward(out, upstream(out))
        assert leaf.grad is not None
        grads.append(leaf.grad)
    first, last = int(offsets[6]), int(offsets[18])
    assert first < last and bool((grads[1][first:last] == 0).all())
    grads[0][first:last] = 0
    assert torch.equal(*grads)


def test_eval_and_no_grad_follow_autograd_alone() -> None:
    ids, offsets, _ = batch(1)
    module = tables(learning_rate=LR)
    before = module.weights_host.detach().clone()
    with torch.no_grad():
        assert not module(ids, offsets).requires_grad
    module.eval()(ids, offsets).sum().backward()
    assert not torch.equal(module.weights_host, before)


def test_frozen_tables_stay() -> None:
    module = tables().requires_grad_(False)
    assert not module(*batch(1)[:2]).requires_grad


def test_a_compiled_module_trains() -> None:
    ids, offsets, scales = batch(1)
    module, other = tables(optimizer=OptimType.EXACT_ADAGRAD), tables(optimizer=OptimType.EXACT_ADAGRAD)
    compiled = torch.compile(module, backend="eager")
    for each in (compiled, other):
        for _ in range(2):
            out = each(ids, offsets, scales)
            torch.autograd.backward(out, upstream(out))
    assert torch.equal(module.weights_host, other.weights_host)


def test_the_comparison_with_fbgemm_runs_and_finds_what_is_planted() -> None:
    rows, faults = check_all(OURS)
    assert len(rows) == len(CHECKS) and not faults
    sizes = compare(CASES[5], OURS)
    assert sizes and not any(sizes.values())
    held = {"table": torch.zeros(3)}
    assert not list(apart(held, held)) and list(apart(held, {"table": torch.tensor([0, 0, 1e-4])}))
    assert list(apart(held, {})) and list(apart(held, {"table": torch.zeros(3).half()}))
    assert torch.equal(make(OURS).weights_host, make(OURS).weights_host)
