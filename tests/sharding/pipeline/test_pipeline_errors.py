"""Pipelines end, fail and go on together: on all ranks, in the step whose batch it is.

Takes a minute: every kind of pipeline over ranks, and ranks that fail, each with processes of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_model import Fault, Model, build, features_of
from lone_ranks import Said, start_lone_ranks
from model_zoo import Batch, batch_of, dense_optimizer, drain, same, sharded
from pipeline_runs import CPU, PIPELINES, TRAINING, as_a_plain_loop, equal, pipeline_of
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import KeyedJaggedTensor, TrainPipelineBase, TrainPipelineSparseDist
from shardwise.sharding.pipeline import DataLoadingThread


def uneven_epochs(kind: str, counts: list[list[int]]) -> tuple[list[int], list[str], bool]:
    """Steps of each epoch, warnings, and whether a plain loop over what all ranks have gives the same."""
    model, step_counts, outputs = sharded("ps"), [], list[Tensor]()
    pipeline = pipeline_of(kind, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch, of_ranks in enumerate(counts):
            outs = drain(pipeline.progress, iter([batch_of(10 * epoch + n) for n in range(of_ranks[dist.get_rank()])]))
            step_counts.append(len(outs))
            outputs += outs
    numbers = [10 * epoch + n for epoch, of_ranks in enumerate(counts) for n in range(min(of_ranks))]
    if kind == "eval":
        plain = sharded("ps")
        good = same([plain(batch_of(n))[1].detach() for n in numbers], outputs) and equal(model, plain)
    else:
        good = as_a_plain_loop(model, outputs, numbers)
    return step_counts, [str(warning.message) for warning in caught if "batch left" in str(warning.message)], good


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] if kind != "sparse_dist" else []) for kind in PIPELINES]
)
def test_loaders_of_different_lengths_end_all_ranks_on_the_same_step(kind: str) -> None:
    """Fault 36. The rank that has more waited for the others in its next exchange, for ever."""
    counts = [[3, 5], [4, 4], [2, 0], [1, 1], [0, 3], [6, 2]]
    ranks = run_ranks(2, uneven_epochs, kind, counts)
    for step_counts, _, good in ranks:
        assert step_counts == [min(of_ranks) for of_ranks in counts]
        assert good
    # once, and by the rank that it happened to first
    assert [len(messages) for _, messages, _ in ranks] == [1, 1]
    assert ranks[1][1][0].startswith("ranks [0] have no batch left: all ranks stop here")


def stop_with_the_loader(kind: str) -> tuple[int, int]:
    pipeline = pipeline_of(kind, sharded("p"), execute_all_batches=False)
    batches = iter([batch_of(n) for n in range(6 + dist.get_rank())])
    first = len(drain(pipeline.progress, batches))
    return first, len(drain(pipeline.progress, iter([batch_of(n) for n in range(3)])))


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "under_way"), [("sparse_dist", 2), ("prefetch", 3)])
def test_execute_all_batches_false_leaves_what_is_under_way_to_the_next_call(kind: str, under_way: int) -> None:
    for step_counts in run_ranks(2, stop_with_the_loader, kind):
        # six batches, of which those under way wait for the next iterator; its own last ones wait too
        assert step_counts == (6 - under_way, 3)


class Failing:
    """Eight batches, of which the last rank cannot load one, or has an id in it that no table has."""

    def __init__(self, bad: int, error: Exception | None) -> None:
        self._next, self._bad, self._error = 0, bad, error

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        number, self._next = self._next, self._next + 1
        if number == 8:
            raise StopIteration
        batch = batch_of(number)
        if number == self._bad and dist.get_rank() == dist.get_world_size() - 1:
            if self._error is not None:
                raise self._error
            kjt, lengths = batch.pooled, batch.pooled.lengths().clone()
            lengths[0] += 1
            ids = torch.cat([torch.tensor([999]), kjt.values()])
            batch.pooled = KeyedJaggedTensor(kjt.keys(), ids, None, lengths)
        return batch


ERRORS: dict[str, Exception | None] = {
    "value": ValueError("line 7 has 3 columns"),
    "key": KeyError("no column 'age'"),
    "other": FileNotFoundError("day_3.tsv"),
    "id": None,
}


def collect(pipeline: Any, batches: Iterator[Any]) -> tuple[list[Tensor], list[tuple[int, str, str]]]:
    """Outputs, and what was raised before output number n."""
    outputs: list[Tensor] = []
    raised: list[tuple[int, str, str]] = []
    while True:
        try:
            outputs.append(pipeline.progress(batches).detach().clone())
        except StopIteration:
            return outputs, raised
        except Exception as error:
            raised.append((len(outputs), type(error).__name__, str(error.args[0])))


def with_a_bad_batch(kind: str, bad: int, error: str, threaded: bool) -> tuple[bool, list[tuple[int, str, str]]]:
    model, batches = sharded("ps"), Failing(bad, ERRORS[error])
    loader: Any = DataLoadingThread(CPU, batches, False) if threaded else batches
    outputs, raised = collect(pipeline_of(kind, model), loader)
    return as_a_plain_loop(model, outputs, [n for n in range(8) if n != bad]), raised


SAID = {
    "value": ("ValueError", "rank 1: line 7 has 3 columns"),
    "key": ("KeyError", "rank 1: no column 'age'"),
    "other": ("RuntimeError", "rank 1: FileNotFoundError: day_3.tsv"),
    "id": ("RefusedIndexError", "rank 1: feature 'f0' (table 't0'), sample 0: id 999 is outside [0, 40)"),
}


@pytest.mark.sampled(3)
@pytest.mark.ranks
@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize(
    ("bad", "error", "threaded"),
    [
        *(
            (*case, threaded)
            for case in ((0, "value"), (1, "key"), (4, "other"), (7, "value"))
            for threaded in (False, True)
        ),
        *((bad, "id", False) for bad in (0, 1, 2, 5, 6)),
    ],
)
def test_a_bad_batch_of_one_rank_fails_its_step_on_all(kind: str, bad: int, error: str, threaded: bool) -> None:
    """Fault 37. The rank left the loop and the others waited for it; now the next batches train on all ranks.

    Fault 4. A bad id is not raised while the batch before trains, though the ranks know of it by then; that batch is
    not lost.
    """
    for good, raised in run_ranks(2, with_a_bad_batch, kind, bad, error, threaded):
        assert raised == [(bad, *SAID[error])]
        assert good


def keys_in_an_order_of_the_rank() -> bool:
    model, batches = sharded("p"), [batch_of(n) for n in range(6)]
    for batch in batches if dist.get_rank() == 1 else ():
        batch.pooled = batch.pooled.permute([3, 1, 0, 2])
    return as_a_plain_loop(model, drain(pipeline_of("sparse_dist", model).progress, iter(batches)), range(6), "p")


@pytest.mark.ranks
def test_keys_in_another_order_on_one_rank_are_never_mixed() -> None:
    """Fault 27."""
    assert run_ranks(2, keys_in_an_order_of_the_rank) == [True, True]


def fail_in_the_forward() -> tuple[list[tuple[int, str, str]], bool]:
    model = sharded("ps")
    pipeline = pipeline_of("sparse_dist", model, custom_model_fwd=_failing_forward(model))
    outputs, raised = collect(pipeline, map(batch_of, range(8)))
    return raised, as_a_plain_loop(model, outputs, [n for n in range(8) if n not in (0, 4)])


def _failing_forward(model: nn.Module) -> Any:
    calls = iter(range(100))

    def forward(batch: Batch) -> Any:
        number = next(calls)
        if number in (0, 4):
            raise ZeroDivisionError(f"call {number}")
        return model(batch)

    return forward


@pytest.mark.ranks
def test_after_an_error_in_the_forward_of_one_process_the_next_batch_trains() -> None:
    ((raised, good),) = run_ranks(1, fail_in_the_forward)
    assert raised == [(0, "ZeroDivisionError", "call 0"), (3, "ZeroDivisionError", "call 4")]
    assert good


def fail_and_go_on() -> list[tuple[str, str]]:
    model = sharded("ps")
    pipeline = pipeline_of("sparse_dist", model, custom_model_fwd=_failing_forward(model))
    batches, errors = map(batch_of, range(8)), []
    for _ in range(3):
        try:
            pipeline.progress(batches)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    return errors


@pytest.mark.ranks
def test_after_an_error_in_the_forward_several_ranks_do_not_go_on() -> None:
    """Nobody knows whether others failed too: the group is closed, and a step after that waited there for good."""
    for rank, (first, *others) in enumerate(run_ranks(2, fail_and_go_on)):
        assert first == ("ZeroDivisionError", "call 0")
        assert [name for name, _ in others] == ["RankFailure"] * 2
        assert all(f"rank {rank} failed in a step" in text and "call 0" in text for _, text in others)


class Choosing(nn.Module):
    """Leaves a sharded module out of some steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.step = model, 0

    def forward(self, batch: Batch) -> Any:
        self.step += 1
        if self.step == 3:
            return batch.dense.sum(), batch.dense
        return self.model(batch)


def leave_a_module_out() -> list[tuple[int, str, str]]:
    model = Choosing(sharded("p"))
    model.eval()
    pipeline: Any = TrainPipelineSparseDist(model, torch.optim.SGD([torch.zeros(1)]), CPU)
    return collect(pipeline, iter([batch_of(n) for n in range(5)]))[1]


@pytest.mark.ranks
def test_a_module_that_the_model_does_not_ask_for_its_batch_is_named() -> None:
    for ((step, kind, message),) in run_ranks(2, leave_a_module_out):
        assert (step, kind) == (2, "RuntimeError")
        assert message.startswith("modules ['model._dmp_wrapped_module.module.pooled']: the batch was routed for them")


def take_turns() -> bool:
    """Train, evaluate in the middle of an epoch, reset, detach; beside a plain loop that does the same."""
    model, plain = sharded("ps"), sharded("ps")
    train, evaluate = pipeline_of("sparse_dist", model), pipeline_of("eval", model)
    batches = iter([batch_of(n) for n in range(12)])
    outputs = [train.progress(batches).detach().clone() for _ in range(3)]
    model.eval()
    evaluated = drain(evaluate.progress, iter([batch_of(50 + n) for n in range(3)]))
    # the model itself, while batches are under way
    evaluated.append(train.detach()(batch_of(60))[1].detach())
    model.train()
    train.attach()
    with torch.no_grad():
        # a step of another kind than its batch left for
        model.eval()
        outputs.append(train.progress(batches).clone())
        model.train()
    outputs += [train.progress(batches).detach().clone() for _ in range(3)]
    train.reset()
    outputs += drain(train.progress, batches)

    optimizer, expected, wanted = dense_optimizer(plain), [], []

    def step(n: int) -> None:
        optimizer.zero_grad()
        loss, output = plain(batch_of(n))
        loss.backward()
        optimizer.step()
        expected.append(output.detach().clone())

    for n in range(3):
        step(n)
    for n in (50, 51, 52, 60):
        wanted.append(plain(batch_of(n))[1].detach())  # noqa: PERF401
    with torch.no_grad():
        expected.append(plain(batch_of(3))[1].clone())
    # reset drops the two batches that were fetched after the seventh
    for n in (4, 5, 6, 9, 10, 11):
        step(n)
    return same(expected, outputs) and same(wanted, evaluated) and equal(model, plain)


@pytest.mark.ranks
def test_pipelines_take_turns_with_each_other_and_with_the_model_itself() -> None:
    assert run_ranks(2, take_turns) == [True, True]


class ByMode(nn.Module):
    """Looks pooled features up in training, weighted ones when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = sharded("pw")

    def forward(self, batch: Batch) -> Any:
        self.model.module.parts = "p" if self.training else "w"
        return self.model(batch)


def evaluate_with_other_modules() -> bool:
    model, plain = ByMode(), ByMode()
    pipeline: Any = TrainPipelineSparseDist(model, torch.optim.SGD([torch.zeros(1)]), CPU)
    batches, outputs, expected = iter([batch_of(n) for n in range(9)]), [], []
    for n, training in enumerate((True, True, True, False, False, False, True, True)):
        model.train(training)
        plain.train(training)
        with torch.set_grad_enabled(training):
            outputs.append(pipeline.progress(batches).detach().clone())
            loss, output = plain(batch_of(n))
        expected.append(output.detach().clone())
        if training:
            loss.backward()
    return same(expected, outputs) and equal(model.model, plain.model)


@pytest.mark.ranks
def test_a_batch_that_left_for_a_step_of_training_leaves_anew_for_one_of_evaluation() -> None:
    assert run_ranks(2, evaluate_with_other_modules) == [True, True]


class Dense(nn.Module):
    """Nothing sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        out = self.layer(batch["dense"])
        return (out * out).mean().unsqueeze(0), out


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_model_without_sharded_modules_trains_in_one_process(kind: str) -> None:
    model, plain = Dense(), Dense()
    batches = [{"dense": torch.randn(3, 4), "names": ["a"], "count": 3} for _ in range(5)]
    pipeline = PIPELINES[kind](model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    outputs = drain(pipeline.progress, iter(batches))
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        losses, output = plain(batch)
        if kind != "eval":
            losses.sum().backward()
            optimizer.step()
        expected.append(output.detach().clone())
    assert same(expected, outputs)


@pytest.mark.parametrize("kind", TRAINING)
def test_a_model_in_eval_mode_is_not_trained(kind: str) -> None:
    model = Dense().eval()
    before = model.layer.weight.detach().clone()
    pipeline = PIPELINES[kind](model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    assert len(drain(pipeline.progress, iter([{"dense": torch.randn(3, 4)} for _ in range(3)]))) == 3
    assert torch.equal(model.layer.weight, before) and model.layer.weight.grad is None


def test_what_cannot_be_moved_to_a_device_is_named() -> None:
    model = Dense()
    pipeline: Any = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    with pytest.raises(TypeError, match="which object lacks"):
        pipeline.progress(iter([{"dense": object()}]))


def test_settings_without_effect_are_named() -> None:
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="^apply_jit: no effect in shardwise"):
        TrainPipelineSparseDist(model, optimizer, CPU, apply_jit=True, free_features_storage_early=True)


def train_to_a_fault(kind: str, fault: Fault) -> None:
    model = build(fault)
    inner = model.module
    assert isinstance(inner, Model)
    optimizer = torch.optim.SGD([*inner.first.parameters(), *inner.last.parameters()], lr=0.1)

    def forward(batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss: Tensor = model(batch)
        inner.come("loss")
        return loss, loss.detach()

    pipeline = TRAINING[kind](model, optimizer, CPU, custom_model_fwd=forward)
    batches = (features_of(step, dist.get_rank()) for step in range(6))
    for inner.step in range(6):
        pipeline.progress(batches)


def fail(*cases: tuple[str, Fault]) -> list[list[Said]]:
    """What both ranks of each pipeline said. All wait at once."""
    groups = [start_lone_ranks(2, train_to_a_fault, kind, fault) for kind, fault in cases]
    outcomes = [group.said() for group in groups]
    for first, _ in outcomes:
        assert (first.error, first.ranks) == ("RankFailure", (1,)), first
    return outcomes


@pytest.mark.ranks
def test_what_one_rank_raises_in_a_step_is_told() -> None:
    """Fault 34: the loss is the user's own code, which neither forward nor backward of the model sees."""
    for first, second in fail(*((kind, Fault("loss", "raise")) for kind in TRAINING)):
        assert "ZeroDivisionError: the loader's seventh batch" in first.text
        assert second.error == "ZeroDivisionError"


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_killed_in_a_step_ends_its_peers() -> None:
    """Fault 34: ids of the next batch are on their way meanwhile."""
    places = ("input exchange", "backward")
    for _, second in fail(*(("sparse_dist", Fault(place, "kill")) for place in places)):
        assert second.killed
