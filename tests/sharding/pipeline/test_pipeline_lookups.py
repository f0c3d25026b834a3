"""Pipelines that look rows up at another time, or keep less under way: bits, ends and errors as of the others."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, plain_loop, same, sharded
from pipeline_runs import CPU, as_a_plain_loop, equal
from ranks import error_of, run_ranks
from test_pipeline_errors import Failing, collect
from test_pipeline_semi_sync import optimizer_of, semi_sync_loop, with_a_dense_table
from test_pipeline_weights import made
from torch import Tensor

from shardwise import DMPCollection, PoolingType, TrainPipelineBase
from shardwise.sharding import (
    EvalPipelineFusedSparseDist,
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)
from shardwise.sharding.modules.placement import sharded_collections
from shardwise.sharding.pipeline.arguments import (
    ArgInfo,
    ArgInfoStepFactory,
    CallArgs,
    EmbeddingTrainPipelineContext,
    TrainPipelineContext,
)
from shardwise.sharding.pipeline.forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
    embedding_backward,
)
from shardwise.sharding.pipeline.postproc import NoOpStream, PipelinedPostproc

pytestmark = pytest.mark.ranks

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lite": (TrainPipelineSparseDistLite, {"free_features_storage_early": True, "clear_data_dist_inputs": True}),
    "fused": (TrainPipelineFusedSparseDist, {}),
    "late": (TrainPipelineFusedSparseDist, {"embedding_lookup_after_data_dist": True, "emb_lookup_stream": "new"}),
    "semi": (TrainPipelineSemiSync, {"start_batch": 1}),
}


def made_of(kind: str, model: Any) -> Any:
    pipeline, settings = KINDS[kind]
    return pipeline(model, dense_optimizer(model), CPU, **settings)


def expected(
    kind: str, model: Any, outputs: list[Tensor], epochs: list[list[int]], parts: str, *, counts_anew: bool = False
) -> bool:
    """Whether a model and its outputs are those of the loop over batches of these numbers."""
    if kind != "semi":
        return as_a_plain_loop(model, outputs, [n for numbers in epochs for n in numbers], parts)
    plain = sharded(parts)
    optimizer, batches = dense_optimizer(plain), [[batch_of(n) for n in numbers] for numbers in epochs]
    wanted: list[Tensor] = []
    for several in [[one] for one in batches] if counts_anew else [batches]:
        wanted += semi_sync_loop(plain, optimizer, several, 1, False)
    return same(wanted, outputs) and equal(model, plain)


def runs(kind: str) -> dict[str, object]:
    """What holds of a pipeline: its bits, its ends over loaders of different lengths, its errors, a fresh start."""
    good: dict[str, object] = {}
    model, outputs, epochs = sharded("pws"), list[Tensor](), list[list[int]]()
    pipeline = made_of(kind, model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ranks .* have no batch left")
        for epoch, of_ranks in enumerate([[4, 6], [2, 0], [3, 3]]):
            numbers = [10 * epoch + n for n in range(of_ranks[dist.get_rank()])]
            outs = drain(pipeline.progress, map(batch_of, numbers))
            epochs.append([10 * epoch + n for n in range(min(of_ranks))])
            good[f"ends {epoch}"] = len(outs) == min(of_ranks)
            outputs += outs
    good["bits"] = expected(kind, model, outputs, epochs, "pws")

    for error in (None, ValueError("line 7")):
        model = sharded("p")
        outputs, raised = collect(made_of(kind, model), Failing(3, error))
        # the batch after one that failed begins anew
        good[f"goes on after {error}"] = expected(kind, model, outputs, [[0, 1, 2], [4, 5, 6, 7]], "p")
        good[f"raises {error}"] = [at for at, _, message in raised if message.startswith("rank 1: ")] == [3]

    model = sharded("p")
    pipeline, before = made_of(kind, model), (batch_of(n) for n in range(20, 27))
    outputs = [pipeline.progress(before).detach().clone() for _ in range(3)]
    pipeline.reset()
    outputs += drain(pipeline.progress, (batch_of(n) for n in range(2)))
    good["reset"] = expected(kind, model, outputs, [[20, 21, 22], [0, 1]], "p", counts_anew=True)
    return good


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] if kind == "late" else []) for kind in KINDS]
)
def test_they_end_fail_and_go_on_as_the_others(kind: str) -> None:
    for of_rank in run_ranks(2, runs, kind):
        assert [what for what, good in of_rank.items() if not good] == []


class Counts(TrainPipelineSparseDistLite[Batch, Tensor]):
    """How many batches are under way in the forward, and how many ids of theirs have left."""

    seen: list[tuple[int, int]]

    def _model_fwd(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.seen.append((len(self.batches), sum(bool(fetched.started) for fetched in self._queue)))
        return super()._model_fwd(batch)


def under_way() -> list[tuple[int, int]]:
    model = sharded("p")
    pipeline = Counts(model, dense_optimizer(model), CPU)
    pipeline.seen = []
    drain(pipeline.progress, (batch_of(n) for n in range(4)))
    return pipeline.seen


def test_lite_has_one_batch_under_way_while_its_rows_are_looked_up() -> None:
    """In the first step nobody knows yet which parts of the batch the model looks up."""
    assert run_ranks(1, under_way) == [[(1, 0), (1, 1), (1, 1), (1, 1)]]


def evaluates(prefetch: bool) -> tuple[bool, bool, list[int]]:
    """Whether outputs are those of the model, whose weights stay; and after which forwards rows had been looked up."""
    model, plain = sharded("ps"), sharded("ps")
    log: list[int] = []
    number = [0]
    collection: Any = model.module.pooled
    look_up = collection.look_up

    def counted(step: Any, *, all_tables: bool = False) -> None:
        if step.phase < 3:
            log.append(number[0])
        look_up(step, all_tables=all_tables)

    collection.look_up = counted
    model.module.register_forward_hook(lambda *_: number.__setitem__(0, number[0] + 1))
    pipeline: Any = EvalPipelineFusedSparseDist(
        model, dense_optimizer(model), CPU, enable_embedding_lookup_prefetch=prefetch
    )
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(5)))
    with torch.no_grad():
        wanted = [plain(batch_of(n))[1] for n in range(5)]
    return same(wanted, outputs), equal(model, plain), log


def test_an_evaluation_may_look_the_next_batch_up_after_the_forward() -> None:
    """With it the rows of a batch are there before its step; each batch is looked up once either way."""
    for prefetch in (False, True):
        assert run_ranks(2, evaluates, prefetch) == [(True, True, [0, 1, 2, 3, 4])] * 2


def processed(kind: str) -> tuple[bool, list[str]]:
    """Whether a feature-processed model has the bits of a plain loop, and what was warned of."""
    model, plain = made("mix", PoolingType.SUM), made("mix", PoolingType.SUM)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = drain(made_of(kind, model).progress, (batch_of(n) for n in range(6)))
    good = same(plain_loop(plain, (batch_of(n) for n in range(6))), outputs) and equal(model, plain)
    return good, [str(one.message) for one in caught if "looked up in its step" in str(one.message)]


def test_weights_that_processors_make_are_those_of_the_step() -> None:
    """Their lookup is in the step, with the newest of all, and the semi-synchronous pipeline says so once."""
    assert run_ranks(2, processed, "fused") == [(True, [])] * 2
    for good, (message,) in run_ranks(2, processed, "semi"):
        assert good and message.startswith("module 'processed._embedding_bag_collection' is looked up in its step")


def refusals() -> list[str]:
    model = sharded("p", Net("p"))
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    dense, mixed = dense_optimizer(model), with_a_dense_table()
    return [
        error_of(TrainPipelineFusedSparseDist, model, dense, CPU, emb_lookup_stream="side"),
        error_of(TrainPipelineSemiSync, model, dense, CPU, start_batch=-1),
        error_of(TrainPipelineSemiSync, model, every, CPU, strict=True),
        error_of(TrainPipelineSemiSync, mixed, optimizer_of(mixed), CPU, strict=True),
        error_of(
            GradientAccumulationWrapper, TrainPipelineSemiSync(model, dense, CPU, stash_gradients=True), dense, model,
            GradientAccumulationConfig(num_steps=2),
        ),
    ]  # fmt: skip


def test_what_makes_no_sense_is_refused() -> None:
    side, negative, fused, by_gradient, accumulated = run_ranks(1, refusals)[0]
    assert accumulated.startswith("ValueError: stash_gradients=True exchanges the gradients of each micro-batch")
    assert side == "ValueError: emb_lookup_stream: must be one of ['data_dist', 'new', 'current'], got 'side'"
    assert negative == "ValueError: start_batch: must not be negative, got -1"
    # an optimizer that lists tables which their backward trains steps over them
    assert fused == ""
    assert by_gradient.startswith(
        "ValueError: module 'pooled': the pipeline's optimizer trains its tables ['embedding_bags.t2.weight'] by their"
    )


def semi_sync(parts: str, outputs: list[Tensor], model: Any) -> bool:
    """Whether all is as in a loop that looks each batch up before the update of the one before."""
    plain = sharded(parts)
    wanted = semi_sync_loop(plain, dense_optimizer(plain), [list(map(batch_of, range(len(outputs))))], 0, False)
    return same(wanted, outputs) and equal(model, plain) and len(outputs) == 6


def by_stages() -> bool:
    """A loop over stages, one of which looks up."""
    model = sharded("pws")
    sparse: SparseDataDistUtil[Batch] = SparseDataDistUtil(model, None)
    lookup = PipelineStage("start_embedding_lookup", sparse.start_embedding_lookup, None)
    pipeline: StagedTrainPipeline[Batch, Batch] = StagedTrainPipeline([sparse.start_sparse_data_dist_stage(), lookup])
    batches, optimizer, outputs = iter([batch_of(n) for n in range(6)]), dense_optimizer(model), []
    while (batch := pipeline.progress(batches)) is not None:
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.backward()
        optimizer.step()
        outputs.append(output.detach().clone())
    return semi_sync("pws", outputs, model)


def by_hand(kind: str) -> bool:
    """A pipeline of one's own, whose forwards give the model what was looked up ahead."""
    model = sharded("ps")
    sources: dict[str, Any] = {"pooled": lambda b: b.pooled, "sequence": lambda b: b.lists["history"]}
    modules: dict[str, Any] = dict(sharded_collections(model.module))
    make: Any = EmbeddingPipelinedForward if kind == "detached" else InSyncEmbeddingPipelinedForward
    contexts = [EmbeddingTrainPipelineContext(index=n) for n in range(6)]
    for path, module in modules.items():
        module.forward = make(path, CallArgs([], {}), module, contexts[0])

    def look_up(number: int) -> None:
        for path, module in modules.items():
            ctx = contexts[number].module_contexts[path] = module.create_context()
            arrived = module.input_dist(ctx, sources[path](batch_of(number))).wait().wait()
            contexts[number].embedding_a2a_requests[path] = module.compute_and_output_dist(ctx, arrived)

    optimizer, outputs = dense_optimizer(model), []
    look_up(0)
    for number, context in enumerate(contexts):
        for module in modules.values():
            module.forward.set_context(context)
        losses, output = model(batch_of(number))
        if number < 5:
            look_up(number + 1)
        optimizer.zero_grad()
        losses.backward()
        if kind == "detached":
            embedding_backward(context)
            assert context.embedding_features == [[["f0", "f1", "f2", "f3"]], ["f0", "f1", "f2"]]
        optimizer.step()
        outputs.append(output.detach().clone())
    return semi_sync("ps", outputs, model)


def parts_of_pipelines() -> dict[str, bool]:
    return {"stages": by_stages(), "detached": by_hand("detached"), "in sync": by_hand("in sync")}


def test_pipelines_of_ones_own_may_look_up_ahead() -> None:
    """With the staleness of `TrainPipelineSemiSync` from the first batch on."""
    assert run_ranks(2, parts_of_pipelines) == [{"stages": True, "detached": True, "in sync": True}] * 2


class Post(torch.nn.Module):
    """Makes of a batch what a sharded module gets, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.calls = torch.nn.Linear(2, 2), 0

    def forward(self, dense: Tensor) -> Tensor:
        self.calls += 1
        return self.over(dense) * (1 if self.training else 2)  # type: ignore[no-any-return]


def test_a_postproc_in_the_model_gives_what_was_made_ahead() -> None:
    """Once for each batch; the model's names, weights and mode are as without it."""
    inner = Post()
    model = torch.nn.Sequential(inner)
    names, batch = list(model.state_dict()), {"dense": torch.ones(1, 2)}
    contexts = [TrainPipelineContext(index=n) for n in range(2)]
    args = CallArgs([ArgInfo([ArgInfoStepFactory.get_item("dense")])], {})
    model[0] = post = PipelinedPostproc(inner, "0", args, contexts[0], None, None)
    ahead = post(batch)
    assert model(torch.zeros(5, 2)) is ahead and inner.calls == 1 and post.get_context() is contexts[0]
    assert torch.equal(ahead, inner(batch["dense"]))
    post.set_context(contexts[1])
    with pytest.raises(RuntimeError, match="call it with the batch alone"):
        post(torch.zeros(1), torch.zeros(1))
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]
    model.load_state_dict({name: torch.zeros(2, 2) if "weight" in name else torch.ones(2) for name in names})
    model.eval()
    assert torch.equal(post(batch), torch.full((1, 2), 2.0)) and not inner.training
    with NoOpStream(None) as nothing:
        assert isinstance(nothing, NoOpStream)


def test_replicas_are_averaged_after_every_so_many_batches() -> None:
    """By the number of the batch; what is no `DMPCollection`, or has no interval, is left alone."""
    replicas: Any = Mock(spec=DMPCollection)
    layer = torch.nn.Linear(1, 1)
    pipeline: Any = TrainPipelineBase(layer, torch.optim.SGD(layer.parameters(), lr=0.1), CPU)
    for number in range(5):
        pipeline.sync_embeddings(replicas, 2, TrainPipelineContext(index=number))
        pipeline.sync_embeddings(replicas, None, TrainPipelineContext(index=number))
        pipeline.sync_embeddings(layer, 2, TrainPipelineContext(index=number))
    assert replicas.sync.call_count == 3
    with pytest.raises(ValueError, match="sync_embeddings counts batches by context.index"):
        pipeline.sync_embeddings(replicas, 2)
