"""Pipelines of one's own: stages that a user chooses, batches loaded by a thread, and TorchRec's parts by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, Net, batch_of, dense_optimizer, plain_loop, same, sharded
from pipeline_runs import CPU, as_a_plain_loop
from ranks import run_ranks
from torch import Tensor, fx, nn

from shardwise import (
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    construct_module_sharding_plan,
)
from shardwise.sharding import table_wise
from shardwise.sharding.dmp.tracing import Tracer
from shardwise.sharding.modules.placement import sharded_collections
from shardwise.sharding.pipeline import (
    DataLoadingThread,
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineSparseDist,
)
from shardwise.sharding.pipeline.arguments import (
    ArgInfo,
    ArgInfoStepFactory,
    CallArgs,
    NodeArgsHelper,
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)
from shardwise.sharding.pipeline.forwards import (
    PipelinedForward,
    PrefetchEmbeddingPipelinedForward,
    PrefetchPipelinedForward,
)


def stages_of(*names: str) -> tuple[list[PipelineStage], list[str]]:
    """Stages that note what they do: "a3" is stage a with batch 3."""
    log: list[str] = []

    def noting(name: str) -> PipelineStage:
        def run(batch: str) -> str:
            log.append(name + batch[-1])
            return batch

        return PipelineStage(name, run, None, lambda: log.append(f"{name}f"), lambda: log.append(f"{name}x"))

    return [noting(name) for name in names], log


def test_each_stage_has_another_batch() -> None:
    stages, log = stages_of("a", "b")
    pipeline: StagedTrainPipeline[str, str] = StagedTrainPipeline(stages)
    assert pipeline.num_stages == 2
    batches = iter(["n0", "n1", "n2"])
    results = [pipeline.progress(batches)]
    assert log == ["a0", "af", "b0", "bf", "a1", "af", "a2", "b1"]
    results += [pipeline.progress(batches) for _ in range(3)]
    assert results == ["n0", "n1", "n2", None]
    assert log[8:] == ["ax", "b2", "ax", "bx", "ax", "bx"]
    # the next epoch
    next_epoch = iter(["n3", "n4"])
    assert [pipeline.progress(next_epoch) for _ in range(3)] == ["n3", "n4", None]


def test_a_flush_finishes_what_is_under_way_and_goes_on() -> None:
    stages, _ = stages_of("a", "b", "c")
    calls: list[str] = []
    pipeline: StagedTrainPipeline[str, str] = StagedTrainPipeline(stages, on_flush_end=lambda: calls.append("over"))
    batches = iter([f"n{n}" for n in range(7)])
    assert pipeline.progress(batches) == "n0"
    pipeline.set_flush(True)
    assert [pipeline.progress(batches) for _ in range(3)] == ["n1", "n2", "n3"]
    assert not calls
    assert pipeline.progress(batches) == "n4"
    assert calls == ["over"]
    assert [pipeline.progress(batches) for _ in range(3)] == ["n5", "n6", None]


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        StagedTrainPipeline([])
    stream: Any = object()
    with pytest.raises(ValueError, match="a lookup brings rows to their slots itself; give one"):
        SparseDataDistUtil(nn.Linear(1, 1), None, prefetch_stream=stream, embedding_lookup_stream=stream)


def train_by_stages(prefetches: bool, counts: list[int], fails: bool) -> tuple[bool, int, list[str], list[str]]:
    """Whether all is as in a plain loop, steps, warnings, and what was raised."""
    model = sharded("ps")
    sparse: SparseDataDistUtil[Batch] = SparseDataDistUtil(model, None)
    stages = [PipelineStage("copy", lambda batch: batch.to(CPU), None), sparse.start_sparse_data_dist_stage()]
    if prefetches:
        stages.append(PipelineStage("prefetch", sparse.prefetch, None, sparse.load_prefetch))
    pipeline: StagedTrainPipeline[Batch, Batch] = StagedTrainPipeline(stages)
    optimizer, outputs, raised = dense_optimizer(model), [], []
    count = counts[dist.get_rank()]

    def load() -> Iterator[Batch]:
        for n in range(count):
            if fails and n == 4 and dist.get_rank() == 1:
                raise OSError("day_4.tsv is not there")
            yield batch_of(n)

    batches = load()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            while (batch := pipeline.progress(batches)) is not None:
                optimizer.zero_grad()
                losses, output = model(batch)
                losses.backward()
                optimizer.step()
                outputs.append(output.detach().clone())
        except OSError as error:
            raised.append(str(error))
    assert sparse.detach() is model
    messages = [str(w.message) for w in caught if "no batch left" in str(w.message)]
    return as_a_plain_loop(model, outputs, range(len(outputs))), len(outputs), messages, raised


@pytest.mark.ranks
@pytest.mark.parametrize("prefetches", [False, True], ids=["routed", "prefetched"])
def test_a_loop_over_stages_gives_the_bits_of_a_plain_one(prefetches: bool) -> None:
    assert run_ranks(2, train_by_stages, prefetches, [9, 9], False) == [(True, 9, [], [])] * 2


@pytest.mark.ranks
def test_stages_of_all_ranks_end_on_the_same_step() -> None:
    """Fault 36."""
    first, (*ended, messages, _) = run_ranks(2, train_by_stages, False, [4, 7], False)
    assert first == (True, 4, [], []) and ended == [True, 4]
    assert messages[0] == "another rank has no batch left: a batch of this rank is left out"


@pytest.mark.ranks
def test_a_loader_that_raises_ends_the_stages_of_all_ranks() -> None:
    """Fault 37: the rank itself raises, in the step whose batch it was; the others end there."""
    ranks = run_ranks(2, train_by_stages, False, [7, 7], True)
    assert [(good, steps, raised) for good, steps, _, raised in ranks] == [
        (True, 4, []),
        (True, 4, ["day_4.tsv is not there"]),
    ]


def numbers(count: int, bad: int | None = None) -> Iterator[Tensor]:
    for n in range(count):
        if n == bad:
            raise ValueError("half a line")
        yield torch.tensor([n])


def test_a_thread_loads_in_order_and_ends() -> None:
    thread: DataLoadingThread[Tensor] = DataLoadingThread(CPU, numbers(3), False)
    thread.start()
    batches = [thread.get_next_batch() for _ in range(5)]
    assert [None if batch is None else int(batch) for batch in batches] == [0, 1, 2, None, None]
    with pytest.raises(StopIteration):
        thread.get_next_batch(none_throws=True)
    thread.join(30)
    assert not thread.is_alive()


def test_what_a_thread_fails_on_is_raised_where_the_batch_is_asked_for() -> None:
    thread: DataLoadingThread[Tensor] = DataLoadingThread(CPU, numbers(3, bad=1), False)
    assert int(next(thread)) == 0
    with pytest.raises(ValueError, match="^rank 0: half a line$"):
        thread.get_next_batch()
    # a generator that raised is over
    assert thread.get_next_batch() is None


def test_a_thread_that_is_stopped_gives_no_more() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)

    thread: DataLoadingThread[Tensor] = DataLoadingThread(CPU, endless(), False)
    assert next(thread) is not None
    thread.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert thread.get_next_batch() is None


def averaged(interval: int | None) -> list[int]:
    """Before which batches the replicas were averaged."""
    module = Net("p")
    cut = {f"t{n}": table_wise(0) for n in range(4)}
    plan = ShardingPlan({"pooled": construct_module_sharding_plan(module.pooled, cut, None, 1, 1, "cpu")})
    assert dist.group.WORLD is not None
    model = DMPCollection(module, CPU, plan, 2, 1, dist.group.WORLD)
    trained, synced, sync = [0], [], model.sync

    def noted() -> None:
        synced.append(trained[0])
        sync()

    model.sync = noted  # type: ignore[method-assign,assignment]
    pipeline: TrainPipelineSparseDist[Batch, Tensor] = TrainPipelineSparseDist(
        model, dense_optimizer(model), CPU, dmp_collection_sync_interval_batches=interval
    )
    batches = (batch_of(n) for n in range(7))
    for _ in range(7):
        pipeline.progress(batches)
        trained[0] += 1
    return synced


@pytest.mark.ranks
@pytest.mark.parametrize(("interval", "steps"), [(1, list(range(7))), (3, [0, 3, 6]), (None, [])])
def test_replicas_are_averaged_after_every_so_many_batches(interval: int | None, steps: list[int]) -> None:
    assert run_ranks(2, averaged, interval) == [steps, steps]


step = ArgInfoStepFactory


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step.noop()], {"a": [1, 2]}),
        ([step.get_item("a"), step.get_item(1)], 2),
        ([step.get_attr("real")], AttributeError),
        ([step.from_scalar(7)], 7),
        ([step.from_list([0, ArgInfo([step.get_item("a")])])], [0, [1, 2]]),
        ([step.from_dict({"x": ArgInfo([step.get_item("a")]), "y": 3})], {"x": [1, 2], "y": 3}),
        ([step.get_item("a"), step.postproc(sum)], 3),
        ([], None),
    ],
)
def test_steps_lead_from_the_batch_to_an_argument(steps: list[Any], expected: Any) -> None:
    if expected is AttributeError:
        with pytest.raises(AttributeError):
            ArgInfo(steps).process_steps({"a": [1, 2]})
    else:
        assert ArgInfo(steps).process_steps({"a": [1, 2]}) == expected


def test_steps_are_added_at_both_ends_and_compare_by_what_they_do() -> None:
    arg = ArgInfo([step.get_item(0)]).add_step(step.get_item("a")).append_step(step.get_attr("real"))
    assert arg == ArgInfo([step.get_item("a"), step.get_item(0), step.get_attr("real")])
    call = CallArgs([arg], {"rest": ArgInfo([step.get_item("b")])})
    assert call.build_args_kwargs({"a": [5], "b": "c"}) == ([5], {"rest": "c"})


class Doubled(nn.Module):
    def forward(self, features: KeyedJaggedTensor, times: int) -> KeyedJaggedTensor:
        ids = features.values() * times
        return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


class Prepared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.doubled = Doubled()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.ebc(self.doubled(batch["parts"].features, times=2)).values()


class Parts:
    def __init__(self, features: KeyedJaggedTensor) -> None:
        self.features = features


def call_of(model: nn.Module, module: str) -> fx.Node:
    (node,) = [n for n in Tracer(["Doubled"]).trace(model).nodes if n.op == "call_module" and n.target == module]
    return node


@pytest.mark.parametrize("prepares", [False, True])
def test_a_call_that_the_model_prepares_is_found_only_with_postproc(prepares: bool) -> None:
    model, features = Prepared(), KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    helper = NodeArgsHelper(model, TrainPipelineContext(), prepares)
    call, count = helper.get_node_args(call_of(model, "ebc"))
    assert count == int(prepares) and len(helper.pipelined_postprocs) == int(prepares)
    if prepares:
        (prepared,), _ = call.build_args_kwargs({"parts": Parts(features)})
        assert prepared.values().tolist() == [2, 4, 6]


def test_a_module_with_trained_parameters_is_no_step() -> None:
    model = Prepared()
    model.doubled.scale = nn.Parameter(torch.ones(1))
    assert NodeArgsHelper(model, TrainPipelineContext(), True).get_node_args(call_of(model, "ebc"))[1] == 0
    model.doubled.scale.requires_grad_(False)
    assert NodeArgsHelper(model, TrainPipelineContext(), True).get_node_args(call_of(model, "ebc"))[1] == 1


def by_hand(kind: str, steps: int) -> tuple[bool, str]:
    """Route each batch while the one before trains, as a user's own pipeline does it; the bits of a plain loop."""
    plain = plain_loop(sharded("pw"), map(batch_of, range(steps)))
    model = sharded("pw")
    collections = sharded_collections(model.module)
    graph = Tracer([]).trace(model.module)
    calls = {str(node.target): node for node in graph.nodes if node.op == "call_module" and node.target in collections}
    assert set(calls) == set(collections)
    context: Any = (PrefetchTrainPipelineContext if "Prefetch" in kind else TrainPipelineContext)()
    helper = NodeArgsHelper(model.module, context, False)
    args = {}
    for path, node in calls.items():
        args[path], count = helper.get_node_args(node)
        assert count == 1
    forwards: dict[str, Any] = {}
    make = {
        cls.__name__: cls for cls in (PipelinedForward, PrefetchPipelinedForward, PrefetchEmbeddingPipelinedForward)
    }
    for path, module in collections.items():
        forwards[path] = module.forward = make[kind](path, args[path], module, context)
    optimizer = dense_optimizer(model)

    def route(number: int) -> None:
        for path, module in collections.items():
            ctx = module.create_context()
            (features,), _ = args[path].build_args_kwargs(batch_of(number))
            request = module.input_dist(ctx, features).wait()
            if "Prefetch" in kind:
                context.module_contexts_post_prefetch[path] = ctx
                context.module_input_post_prefetch[path] = request.wait()
            else:
                context.module_contexts[path] = ctx
                context.input_dist_tensors_requests[path] = request

    outputs = []
    route(0)
    for number in range(steps):
        if "Embedding" in kind:
            for forward in forwards.values():
                forward.compute_and_output_dist()
        losses, output = model(batch_of(number))
        if number + 1 < steps:
            route(number + 1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        outputs.append(output.detach())
    with pytest.raises(RuntimeError) as raised:
        model(batch_of(0))
    return same(outputs, plain), str(raised.value)


@pytest.mark.parametrize("kind", ["PipelinedForward", "PrefetchPipelinedForward", "PrefetchEmbeddingPipelinedForward"])
def test_a_pipeline_by_hand_has_the_bits_of_a_plain_loop(kind: str) -> None:
    for equal, message in run_ranks(2, by_hand, kind, 4):
        assert equal
        assert "module 'pooled': " in message


def test_the_context_type_of_the_pipeline_itself_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(1, 1)
        TrainPipelineSparseDist(
            model, torch.optim.SGD(model.parameters(), 0.1), "cpu", True, False, TrainPipelineContext
        )
