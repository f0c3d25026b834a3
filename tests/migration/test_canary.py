"""A canary in modules that stand in for TorchRec's: tables that are ours train as they would without it.

Tables of FBGEMM are ours by its names here, with what else FBGEMM's have and a canary reads: results are the same bits.
`make evidence NAME=canary` does it in the real TorchRec.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.embeddings.optim.fbgemm_types import ComputeDevice, EmbeddingLocation, OptimType, PoolingMode, SparseType
from shardwise.fbgemm.tables import training
from shardwise.migration.canary import Canary
from shardwise.migration.canary.batch import Batch, Ids, runs
from shardwise.migration.canary.shadow import CanaryDifference, difference

NAMES = ["a", "b", "c", "d"]
ROWS, DIMS = [7, 9, 5, 6], [4, 4, 8, 4]
# table b has two features
FEATURES = [0, 1, 1, 2, 3]
SAMPLES = 3


class SplitTableBatchedEmbeddingBagsCodegen(training.SplitTableBatchedEmbeddingBagsCodegen):
    """Ours with what FBGEMM's has besides."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter_cpu = torch.zeros(1, dtype=torch.int64)
        self.calls = 0

    def prepare_inputs(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None = None, sizes: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """FBGEMM's, whose check puts row 0 in the place of bad ids."""
        indices[indices >= 5] = 0
        return indices, offsets.to(indices.dtype), weights, None

    def forward(self, indices: Tensor, offsets: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.calls += 1
        self.iter_cpu += 1
        return super().forward(*self.prepare_inputs(indices, offsets)[:2], *rest, **named)


class Sharded(nn.Module):
    """What a canary reads of TorchRec's sharded collections, of one module of tables."""

    def __init__(self, tables: SplitTableBatchedEmbeddingBagsCodegen, **plan: Any) -> None:
        super().__init__()
        of_table = {"sharding_type": "table_wise", "compute_kernel": "fused", **plan}
        self.module_sharding_plan = {name: SimpleNamespace(**of_table) for name in NAMES}
        configs = SimpleNamespace(embedding_tables=[SimpleNamespace(name=name) for name in NAMES])
        kernel = SimpleNamespace(_emb_module=tables, _config=configs)
        self._lookups = [SimpleNamespace(_emb_modules=[kernel])]

    def forward(self, *args: Any) -> Tensor:
        output: Tensor = self._lookups[0]._emb_modules[0]._emb_module(*args)
        return output


class Unsharded(nn.Module):
    """A collection before TorchRec's DMP."""

    def embedding_bag_configs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in NAMES]


class Model(nn.Module):
    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, *args: Any) -> Tensor:
        output: Tensor = self.sparse(*args)
        return output


@pytest.fixture(autouse=True)
def torchrec_is_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torchrec", ModuleType("torchrec"))
    yield


def tables_of(
    optimizer: OptimType = OptimType.EXACT_ROWWISE_ADAGRAD,
    pooling: PoolingMode = PoolingMode.SUM,
    precision: SparseType = SparseType.FP32,
    **more: Any,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    dims = DIMS if pooling is not PoolingMode.NONE else [4] * len(NAMES)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in zip(ROWS, dims, strict=True)],
        feature_table_map=FEATURES, optimizer=optimizer, pooling_mode=pooling, weights_precision=precision,
        learning_rate=0.1, table_names=NAMES, **more,
    )  # fmt: skip
    torch.manual_seed(3)
    tables.init_embedding_weights_uniform(-1.0, 1.0)
    return tables


def model_of(*args: Any, **kwargs: Any) -> Model:
    return Model(Sharded(tables_of(*args, **kwargs)))


def inner(model: Model) -> SplitTableBatchedEmbeddingBagsCodegen:
    found: SplitTableBatchedEmbeddingBagsCodegen = model.sparse._lookups[0]._emb_modules[0]._emb_module  # type: ignore[union-attr, index]
    return found


def batch_of(step: int, *, weighted: bool = False, sizes: bool = False) -> tuple[Any, ...]:
    """Ids of 5 features; a bad one among them in every third step, and an empty feature in every second."""
    generator = torch.Generator().manual_seed(step)
    of_features = [[1, 2], [2, 1], [0, 3], [1, 1], [2, 2]] if sizes else [[SAMPLES]] * len(FEATURES)
    lengths = torch.randint(0, 4, (sum(map(sum, of_features)),), generator=generator)
    if step % 2:
        lengths[: sum(of_features[0])] = 0
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    if step % 3 == 0:
        ids[0] = 100
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.rand(len(ids), generator=generator).requires_grad_() if weighted else None
    return ids, offsets, weights, None, of_features if sizes else None


def train(model: Model, steps: range = range(6), **how: Any) -> list[Tensor]:
    """Outputs, and gradients of weights, of some steps."""
    seen = []
    for step in steps:
        batch = batch_of(step, **how)
        # what is given would be changed by the check
        output = model(batch[0].clone(), *batch[1:])
        factors = torch.linspace(-1, 1, output.numel()).view(output.shape)
        (output * factors).sum().backward()
        seen += [output.detach(), *([batch[2].grad] if batch[2] is not None else [])]
    return seen


def everything(model: Model) -> list[Tensor]:
    """Tables and states."""
    tables = inner(model)
    return [*tables.split_embedding_weights(), *(x for of_table in tables.split_optimizer_states() for x in of_table)]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), n


def plain(*args: Any, how: Any, **kwargs: Any) -> tuple[list[Tensor], Model]:
    """What comes out without a canary."""
    model = model_of(*args, **kwargs)
    return train(model, **how), model


# of which FBGEMM counts no steps
UNCOUNTED = (OptimType.EXACT_SGD, OptimType.EXACT_ADAGRAD)
CASES: dict[str, tuple[OptimType, PoolingMode, Any]] = {
    "sum": (OptimType.EXACT_ROWWISE_ADAGRAD, PoolingMode.SUM, {}),
    "mean, sgd": (OptimType.EXACT_SGD, PoolingMode.MEAN, {}),
    "rows": (OptimType.EXACT_ROWWISE_ADAGRAD, PoolingMode.NONE, {}),
    "adam": (OptimType.ADAM, PoolingMode.SUM, {}),
    "weighted": (OptimType.EXACT_ADAGRAD, PoolingMode.SUM, {"weighted": True}),
    "batch sizes": (OptimType.EXACT_ROWWISE_ADAGRAD, PoolingMode.SUM, {"sizes": True}),
}


@pytest.mark.parametrize("names", [["b"], ["a", "d"], ["b", "c"], NAMES], ids=lambda names: "".join(names))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shadow", [False, True], ids=["canary", "shadow"])
def test_tables_train_as_without_a_canary(case: str, names: list[str], shadow: bool) -> None:
    optimizer, pooling, how = CASES[case]
    expected, without = plain(optimizer, pooling, how=how)
    model = model_of(optimizer, pooling)
    shown = dict(model.named_parameters()) | dict(model.named_buffers())
    trial = shardwise.canary(model, names, shadow=shadow)
    outputs = train(model, **how)
    assert_same_bits(outputs, expected)
    assert_same_bits(everything(model), everything(without))
    # nothing of the model is another object than before
    assert {name: id(x) for name, x in shown.items()} == {
        name: id(x) for name, x in [*model.named_parameters(), *model.named_buffers()]
    }
    report = trial.report()
    assert [half.library for half in report.halves] == ["shardwise"] + (["FBGEMM"] if shadow or names != NAMES else [])
    assert {half.steps for half in report.halves} == {6}
    assert inner(model).calls == (6 if shadow or names != NAMES else 0)
    assert int(inner(model).iter_cpu) == (6 if optimizer not in UNCOUNTED or inner(model).calls else 0)
    for seen in report.differences:
        assert (seen.outputs, seen.weights, seen.states, seen.recopied) == (0, 0, 0, 0)
        assert (seen.steps, seen.updates) == (6, 6)


def test_remove_gives_tables_back_between_steps() -> None:
    expected, without = plain(how={"steps": range(9)})
    model = model_of()
    outputs = train(model, range(3))
    with shardwise.canary(model, ["b", "c"]):
        outputs += train(model, range(3, 6))
        assert "forward" in inner(model).__dict__
    assert "forward" not in inner(model).__dict__
    outputs += train(model, range(6, 9))
    assert_same_bits(outputs, expected)
    assert_same_bits(everything(model), everything(without))


def test_a_canary_before_dmp_comes_with_the_first_forward() -> None:
    expected, without = plain(how={})
    model = Model(Unsharded())
    trial = shardwise.canary(model, ["b"])
    with pytest.raises(RuntimeError, match="first forward after DMP"):
        trial.report()
    # DMP puts sharded modules into the model
    model.sparse = Sharded(tables_of())
    assert_same_bits(train(model), expected)
    assert_same_bits(everything(model), everything(without))
    assert [half.tables for half in trial.report().halves] == [("b",), ("a", "c", "d")]


def test_the_learning_rate_and_settings_of_fbgemm_are_followed() -> None:
    ours, theirs = model_of(OptimType.ADAM), model_of(OptimType.ADAM)
    shardwise.canary(ours, NAMES[:2])
    for model in (ours, theirs):
        train(model, range(1, 3))
        inner(model).set_learning_rate(0.01)
        inner(model).update_hyper_parameters({"beta1": 0.5})
        # as FBGEMM's does
        inner(model).optimizer_args = inner(model).optimizer_args._replace(beta1=0.5)
        train(model, range(4, 6))
    assert_same_bits(everything(ours), everything(theirs))


def test_a_canary_follows_memory_that_moves() -> None:
    ours, theirs = model_of(), model_of()
    shardwise.canary(ours, ["a", "b"])
    for model in (ours, theirs):
        train(model, range(1, 3))
        inner(model)._apply(torch.clone)
        train(model, range(4, 6))
    assert_same_bits(everything(ours), everything(theirs))


def off_by_one_percent(trial: Canary) -> None:
    for lookup in trial._lookups:
        for run in lookup.runs:
            run.group.hyper[0] *= 1.01


def test_a_shadow_that_is_off_raises_and_the_job_is_fbgemms() -> None:
    model = model_of()
    trial = shardwise.canary(model, ["b"], shadow=True)
    off_by_one_percent(trial)
    with pytest.raises(CanaryDifference, match=r"sparse \(tables b\): weights of ours are off by .* after 0 updates"):
        train(model, range(1, 2))
    assert_same_bits(everything(model), everything(plain(how={"steps": range(1, 2)})[1]))


def test_a_shadow_that_is_off_warns_where_asked_and_passes_within_its_tolerance() -> None:
    model = model_of()
    trial = shardwise.canary(model, ["b"], shadow=True, on_difference="warn")
    off_by_one_percent(trial)
    with pytest.warns(UserWarning, match="weights of ours are off"):
        train(model, range(1, 4))
        report = trial.report()
    assert 1e-5 < report.differences[0].weights < 0.1
    assert "sparse  b       3        3 " in str(report)
    trial.remove()
    trial = shardwise.canary(model, ["b"], shadow=True, tolerance=0.5)
    off_by_one_percent(trial)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, range(4, 6))


def test_a_shadow_sees_that_a_checkpoint_was_loaded() -> None:
    model = model_of()
    trial = shardwise.canary(model, ["b"], shadow=True)
    train(model, range(1, 3))
    inner(model).split_embedding_weights()[1].uniform_(-1, 1)
    with pytest.warns(UserWarning, match="rows are others than after the last step"):
        train(model, range(4, 6))
    (seen,) = trial.report().differences
    assert (seen.recopied, seen.outputs) == (1, 0)


def test_rows_of_half_precision_are_compared_within_their_rounding() -> None:
    model = model_of(precision=SparseType.FP16)
    trial = shardwise.canary(model, ["a", "b"], shadow=True)
    train(model, range(6))
    assert trial.report().differences[0].weights < 4e-3


def test_evaluation_trains_nothing_and_compares() -> None:
    model = model_of()
    before = [x.clone() for x in everything(model)]
    trial = shardwise.canary(model, ["b"], shadow=True)
    with torch.no_grad():
        model(*batch_of(1))
    assert_same_bits(everything(model), before)
    assert (trial.report().differences[0].steps, trial.report().differences[0].updates) == (1, 0)


def test_the_report_has_memory_and_time_of_both_halves() -> None:
    model = model_of()
    trial = shardwise.canary(model, ["b"])
    train(model)
    ours, theirs = trial.report().halves
    assert (ours.table_bytes, ours.state_bytes, ours.copied_bytes) == (4 * 9 * 4, 4 * 9, 0)
    assert theirs.table_bytes == 4 * (7 * 4 + 5 * 8 + 6 * 4)
    assert min(ours.forward_us, ours.backward_us, theirs.forward_us, theirs.backward_us) > 0
    assert ours.output_bytes == 4 * SAMPLES * 8
    lines = str(trial.report()).splitlines()
    assert lines[0].split()[:4] == ["module", "library", "tables", "steps"]
    assert [line.split()[1] for line in lines[1:]] == ["shardwise", "FBGEMM"]
    shadow = model_of()
    trial = shardwise.canary(shadow, ["b"], shadow=True)
    assert trial.report().halves[0].copied_bytes == 4 * 9 * 5


@pytest.mark.parametrize(
    ("make", "tables", "options", "error", "message"),
    [
        (model_of, ["x"], {}, ValueError, "no collection of TorchRec's has a table 'x'"),
        (model_of, [], {}, ValueError, "tables must be a list of names"),
        (model_of, "abc", {}, ValueError, "tables must be a list of names"),
        (model_of, ["a", "a"], {}, ValueError, "each once"),
        (model_of, None, {}, ValueError, "a list of names, each once, got None"),
        (model_of, [0], {}, ValueError, r"a list of names, each once, got \[0\]"),
        (lambda: 3, ["a"], {}, ValueError, "model must be a module, got int"),
        (model_of, ["a"], {"shadow": "no"}, ValueError, "shadow must be True or False, got 'no'"),
        (model_of, ["a"], {"tolerance": {"a": 0.1}, "shadow": True}, ValueError, "one number of a shadow"),
        (model_of, ["a"], {"on_difference": "stop"}, ValueError, "'raise' or 'warn', got 'stop'"),
        (model_of, ["a"], {"tolerance": 0.1}, ValueError, "with shadow=False"),
        (model_of, ["a"], {"tolerance": -1.0, "shadow": True}, ValueError, "not negative"),
        (lambda: nn.Linear(1, 1), ["a"], {}, ValueError, "Linear has no collection of TorchRec's"),
        (Unsharded, ["a"], {}, ValueError, "the model is a collection itself"),
        (lambda: Model(Unsharded()), ["x"], {}, ValueError, "has a table 'x'"),
        (lambda: Model(Sharded(tables_of(), sharding_type="data_parallel", compute_kernel="dense")), ["a"], {},
         ValueError, "table 'a' of 'sparse' is data_parallel with the compute kernel 'dense'"),
        (lambda: Model(Sharded(tables_of(), compute_kernel="fused_uvm_caching")), ["a"], {}, ValueError, "'fused_uvm"),
        (lambda: nn.ModuleList([model_of(), model_of()]), ["a"], {}, ValueError, "say 0.sparse.a or 1.sparse.a"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_refused_by_name(
    make: Any, tables: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shardwise.canary(make(), tables, **options)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("use_writeback_bwd_prehook", True, r"sparse \(tables a\): a canary does not serve use_writeback"),
        ("enable_raw_embedding_streaming", True, "does not serve enable_raw_embedding_streaming"),
        ("weights_precision", SparseType.INT8, "does not serve weights_precision=int8"),
        ("weight_decay_mode", 3, "does not serve weight_decay_mode=3"),
        ("embedding_specs", [(7, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CPU)] * 4, "MANAGED_CACHING"),
        ("optimizer", SimpleNamespace(value="mystery", name="MYSTERY"), "does not serve optimizer"),
    ],
)
def test_settings_of_tables_that_ours_would_train_otherwise_are_refused(name: str, value: Any, message: str) -> None:
    model = model_of()
    setattr(inner(model), name, value)
    with pytest.raises(ValueError, match=message):
        shardwise.canary(model, ["a"])
    assert "forward" not in inner(model).__dict__


def test_a_table_of_several_collections_is_named_with_its_path() -> None:
    models = nn.ModuleList([model_of(), model_of()])
    trial = shardwise.canary(models, ["1.sparse.a"])
    assert "forward" not in inner(models[0]).__dict__  # type: ignore[arg-type]
    assert "forward" in inner(models[1]).__dict__  # type: ignore[arg-type]
    trial.remove()
    trial.remove()


@pytest.mark.parametrize("children", ["embedding_bags", "embeddings"])
@pytest.mark.parametrize("how", ["before DMP", "sharded", "one memory", "a dense layer"])
def test_a_table_that_shares_its_weight_is_refused_by_both_names(how: str, children: str) -> None:
    """One parameter in two tables would be trained by ours through one name and by FBGEMM through the other."""
    model = Model(Unsharded()) if how == "before DMP" else model_of()
    bags = {name: nn.Embedding(3, 4) for name in NAMES}
    model.sparse.add_module(children, nn.ModuleDict(bags))
    weight = bags["a"].weight
    if how == "a dense layer":
        over = nn.Linear(4, 3)
        over.weight = weight
        model.add_module("over", over)
    else:
        bags["c"].weight = nn.Parameter(weight.detach()) if how == "one memory" else weight
    other = "over.weight" if how == "a dense layer" else f"sparse.{children}.c.weight"
    with pytest.raises(ValueError, match=f"table 'a' of 'sparse' shares its weight with '{other}'"):
        shardwise.canary(model, ["b", "a"])
    assert how == "before DMP" or "forward" not in inner(model).__dict__
    # tables beside them are served
    shardwise.canary(model, ["b", "d"]).remove()


def test_without_torchrec_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchrec")
    with pytest.raises(ImportError, match="torchrec is not imported"):
        shardwise.canary(model_of(), ["a"])


def test_a_second_canary_a_copy_and_another_forward_are_refused() -> None:
    model = model_of()
    trial = shardwise.canary(model, ["a"])
    with pytest.raises(ValueError, match="there is a canary already"):
        shardwise.canary(model, ["b"])
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"remove\(\) the canary before"):
            copied(inner(model).forward.__self__)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="does not serve vbe_output"):
        inner(model)(*batch_of(1)[:2], vbe_output=torch.zeros(1))
    inner(model).forward = print  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="its forward was replaced after the canary"):
        trial.remove()


def test_a_batch_is_cut_by_features() -> None:
    ids = Ids(torch.arange(6), torch.tensor([0, 2, 2, 3, 3, 4, 6]), torch.arange(6.0))
    batch = Batch(ids, 3, None)
    assert batch.bounds == [0, 2, 3, 6]
    indices, offsets, weights = batch.pick([0, 2])
    assert (indices.tolist(), offsets.tolist()) == ([0, 1, 3, 4, 5], [0, 2, 2, 3, 5])
    assert weights is not None and weights.tolist() == [0, 1, 3, 4, 5]
    indices, offsets, _ = batch.without([0, 2])
    assert (indices.tolist(), offsets.tolist()) == ([2], [0, 0, 0, 1, 1, 1, 1])
    assert batch.without([0, 1, 2]).indices.numel() == 0
    assert (batch.count([1, 2]), batch.count([0, 1, 2])) == (4, 6)
    assert batch.spans([0, 2], [4, 2, 3], pooled=True) == [(0, 4), (6, 9)]
    assert batch.spans([0, 2], [4, 4, 4], pooled=False) == [(0, 2), (3, 6)]
    assert runs([0, 1, 3, 4, 6]) == [(0, 2), (3, 5), (6, 7)]


def test_differences_are_relative_to_the_largest_number() -> None:
    assert difference(torch.tensor([1.0, 4.4]), torch.tensor([1.0, 4.0])) == pytest.approx(0.1)
    assert difference(torch.tensor([torch.nan]), torch.tensor([torch.nan])) == 0
    assert difference(torch.tensor([1.0]), torch.tensor([0.0])) == torch.inf
    assert difference(torch.tensor([torch.nan]), torch.tensor([1.0])) == torch.inf
    assert difference(torch.zeros(0), torch.zeros(0)) == 0


def test_a_group_takes_no_memory_of_another_size() -> None:
    trial = shardwise.canary(model_of(), ["a"])
    group = trial._lookups[0].runs[0].group
    with pytest.raises(ValueError, match="memory for tables and states must have sizes"):
        group.adopt(torch.zeros(3), [torch.zeros(7)])
