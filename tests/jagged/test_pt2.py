"""`torchrec.pt2`: what traces now, hints for compilers, and batches of any number of ids in one graph."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jagged_batches import kjt
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._library.fake_class_registry import has_fake_class

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.jagged.compiled import checks, fake_classes
from shardwise.jagged.compiled.batches import default_pipeline_input_transformer, kjt_for_pt2_tracing
from shardwise.jagged.compiled.fake_classes import deregister_fake_classes, register_fake_classes
from shardwise.jagged.compiled.methods import pt2_compile_callable

NONE = dict.fromkeys(("pt2", "dynamo", "non_strict", "compiler"), False)


def asked() -> dict[str, bool]:
    return {
        "pt2": checks.is_pt2_compiling(), "dynamo": checks.is_torchdynamo_compiling(),
        "non_strict": checks.is_non_strict_exporting(), "compiler": checks.is_compiler_compiling(),
    }  # fmt: skip


class Asks(nn.Module):
    """Its output says what it was told of the tracer: a bit for each answer."""

    def forward(self, x: Tensor) -> Tensor:
        answers = asked()
        return x + sum(2**n for n, name in enumerate(NONE) if answers[name])


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def test_a_program_knows_what_traces_it() -> None:
    zero = torch.zeros(1)
    assert asked() == NONE and Asks()(zero) == 0
    assert compiled(Asks())[0](zero) == 1 + 2 + 8, "torch.compile: pt2, dynamo, compiler"
    assert torch.export.export(Asks(), (zero,), strict=False).module()(zero) == 1 + 4 + 8


def test_the_path_of_dynamo_can_be_asked_for() -> None:
    checks.set_use_torchdynamo_compiling_path(True)
    try:
        assert checks.get_use_torchdynamo_compiling_path()
        assert asked() == {**NONE, "pt2": True, "dynamo": True}
        with pytest.raises(RuntimeError):
            checks.pt2_checks_all_is_size([3, -1])
    finally:
        checks.set_use_torchdynamo_compiling_path(False)
    assert asked() == NONE


def test_hints_say_nothing_where_nothing_traces() -> None:
    empty = torch.empty(0, 3)
    assert checks.pt2_check_size_nonzero(empty) is empty
    assert checks.pt2_checks_all_is_size([-1]) == [-1]
    checks.pt2_checks_tensor_slice(empty, 5, 2)
    for guard in (checks.pt2_guard_or_false, checks.pt2_guard_or_true):
        assert [guard(True), guard(False)] == [True, False]


def cut(values: Tensor, sizes: Tensor) -> Tensor:
    """The sum of a slice whose ends only the data knows."""
    begin, end = checks.pt2_checks_all_is_size(sizes.tolist())
    checks.pt2_checks_tensor_slice(values, begin, end)
    return values[begin:end].sum()


def test_a_slice_by_data_compiles_with_the_hints_and_is_checked_when_it_runs() -> None:
    function, counter = compiled(cut)
    values = torch.arange(10.0)
    for begin, end in ((2, 5), (0, 10), (4, 4)):
        assert function(values, torch.tensor([begin, end])) == values[begin:end].sum()
    assert counter.frame_count == 1
    with pytest.raises(RuntimeError):
        function(values, torch.tensor([5, 2]))
    with pytest.raises(RuntimeError):
        function(values, torch.tensor([5, 20]))


def counted(marks: Tensor) -> Tensor:
    """How the guards answer for a number of rows that nobody knows, and for what the hint says of it."""
    rows = checks.pt2_check_size_nonzero(marks.nonzero())
    few, empty = rows.shape[0] == 2, rows.shape[0] == 0
    answer = 0
    if checks.pt2_guard_or_false(few):
        answer += 1
    if checks.pt2_guard_or_true(few):
        answer += 2
    if checks.pt2_guard_or_true(empty):
        answer += 4
    return rows.sum() * 0 + answer


def test_guards_answer_for_sizes_that_nobody_knows() -> None:
    assert compiled(counted)[0](torch.tensor([0, 0, 1])) == 2, "one row, and nobody knew"


BATCHES = [
    {"a": [[1, 2], [3], []], "b": [[], [4], [5, 6]]},
    {"a": [[1], [], []], "b": [[], [], []]},
    {"a": [[], [], []], "b": [[], [], []]},
    {"a": [[1, 2, 3, 4], [5], [6]], "b": [[0, 0, 0], [1], [2]]},
]


@pytest.mark.parametrize("convert_to_vb", [False, True])
def test_batches_of_any_number_of_ids_run_one_graph(convert_to_vb: bool) -> None:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name=f"t{n}", num_embeddings=8, embedding_dim=4, feature_names=[n]) for n in "ab"]
    )
    table = ebc.get_parameter("embedding_bags.ta.weight")
    function, counter = compiled(lambda features: ebc(features).values())
    for batch in BATCHES:
        features = kjt(batch)
        wanted = ebc(features).values()
        traced = kjt_for_pt2_tracing(features, convert_to_vb=convert_to_vb)
        assert traced.variable_stride_per_key() is convert_to_vb
        found = function(traced)
        assert torch.equal(found, wanted)
        (of_graph,) = torch.autograd.grad(found.square().sum(), [table])
        (of_eager,) = torch.autograd.grad(wanted.square().sum(), [table])
        assert torch.equal(of_graph, of_eager)
    assert counter.frame_count == 1


def test_a_batch_for_tracing_is_one_of_int64_with_the_weights_and_sizes_that_it_had() -> None:
    given = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0.5, 1, 2]),
        torch.tensor([1, 2, 0], dtype=torch.int32), stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0], [1, 0, 1]])),
    )  # fmt: skip
    traced = kjt_for_pt2_tracing(given)
    assert (traced.values().dtype, traced.lengths().dtype) == (torch.int64, torch.int64)
    assert torch.equal(traced.values(), given.values()) and torch.equal(traced.weights(), given.weights())
    assert traced.stride_per_key_per_rank() == [[1], [2]]
    assert torch.equal(traced.inverse_indices()[1], given.inverse_indices()[1])
    same = kjt_for_pt2_tracing(given, convert_to_vb=True)
    assert same.stride_per_key_per_rank() == [[1], [2]]


def test_the_transformer_of_pipelines_makes_features_ready_and_lets_all_else_be() -> None:
    first, other = kjt(BATCHES[0]), kjt(BATCHES[1])
    batch = SimpleNamespace(id_list_features=first, id_score_list_features=None, sparse_features=other)
    assert default_pipeline_input_transformer(batch) is batch
    assert batch.id_list_features is not first and batch.id_list_features.values().tolist() == first.values().tolist()
    assert batch.id_score_list_features is None and batch.sparse_features is other


def test_fakes_of_fbgemms_classes_are_registered_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "__torch__.torch.classes.fbgemm.TensorQueue"
    register_fake_classes()
    assert not has_fake_class(name), "shardwise has no such class"
    deregister_fake_classes()
    # as after import fbgemm_gpu
    monkeypatch.setattr(torch._C, "_get_custom_class_python_wrapper", lambda *_: object())
    register_fake_classes()
    assert has_fake_class(name)
    deregister_fake_classes()
    assert not has_fake_class(name)


def test_fakes_count_and_queue_as_the_classes_do() -> None:
    counter = fake_classes.FakeAtomicCounter.__obj_unflatten__((("counter_", 3),))
    assert [counter.increment(), counter.increment(), counter.decrement(), counter.get()] == [4, 5, 4, 4]
    counter.set(9)
    assert counter.get() == 9
    counter.reset()
    assert counter.get() == 0
    first, tensor = torch.zeros(1), torch.ones(1)
    queue = fake_classes.FakeTensorQueue.__obj_unflatten__((("queue", []), ("init_tensor", first)))
    assert queue.pop() is first and queue.top() is first and queue.size() == 0
    queue.push(tensor)
    assert queue.top() is tensor and queue.size() == 1 and queue.pop() is tensor and queue.size() == 0


class Metric(nn.Module):
    enable_pt2_compile = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    @pt2_compile_callable
    def compute(self, x: Tensor) -> Tensor:
        """Doubled, or trebled where it is compiled."""
        return x * (3 if torch.compiler.is_compiling() else 2)


def test_a_method_is_compiled_for_objects_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend="eager"))
    metric, other = Metric(), Metric()
    metric.enable_pt2_compile = True
    assert metric.compute(torch.ones(1)) == 3 and other.compute(torch.ones(1)) == 2
    assert metric.compute(torch.ones(1)) == 3
