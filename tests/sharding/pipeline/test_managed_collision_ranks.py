"""Managed collision collections over ranks: slots, rows and states of one process, or of one process for each range."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jagged_batches import kjt
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.managed_collision import (
    DistanceLFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
    change_ids,
    fresh_rows,
)
from shardwise.jagged import JaggedTensor
from shardwise.sharding import (
    PrefetchTrainPipelineSparseDist,
    ShardingEnv,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.comms.failures import RankFailure
from shardwise.sharding.modules.default_sharders import get_default_sharders, sharder_of
from shardwise.sharding.modules.managed_collision import (
    ManagedCollisionCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddings,
)
from shardwise.sharding.modules.sharders import EmbeddingBagCollectionSharder

pytestmark = pytest.mark.ranks

ROWS, DIM, IDS, SAMPLES, STEPS = {"a": 12, "b": 8}, 64, 1000, 8, 7


def hashed(ids: Tensor, size: int) -> Tensor:
    return ids * 37 % size


class Net(nn.Module):
    """Two tables behind maps; b hashes its ids."""

    def __init__(self, pooled: bool, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
        features = {"a": ["f", "g"], "b": ["h"]}
        tables = [config(ROWS[name], DIM, name, feature_names=features[name]) for name in ROWS]
        collection: Any = EmbeddingBagCollection(tables) if pooled else EmbeddingCollection(tables)
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
        modules = {
            "a": MCHManagedCollisionModule(ROWS["a"], "cpu", LRU_EvictionPolicy(), 2, IDS, name="a"),
            "b": MCHManagedCollisionModule(ROWS["b"], "cpu", DistanceLFU_EvictionPolicy(), 1, IDS, hashed, name="b"),
        }
        make: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
        self.mc = make(collection, ManagedCollisionCollection(modules, tables), **settings)
        # slots of each batch, if they are returned
        self.remapped: list[Any] = []

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        output, remapped = self.mc(features)
        self.remapped.append(remapped)
        return [value if isinstance(value, Tensor) else value.values() for value in (output[name] for name in "fgh")]


def batch_of(step: int, begin: int = 0, end: int = SAMPLES) -> KeyedJaggedTensor:
    """Samples [begin, end) of a batch whose ids drift, with a feature that nothing looks up."""
    draw = torch.Generator().manual_seed(step)
    keys = ["h", "x", "g", "f"]
    lengths = torch.randint(0, 4, (len(keys), SAMPLES), generator=draw)
    ids = torch.randint(0, 14, (len(keys), SAMPLES, 4), generator=draw) * 71 + 5 * step
    values = [ids[k, b, : int(lengths[k, b])] for k in range(len(keys)) for b in range(begin, end)]
    return KeyedJaggedTensor(keys, torch.cat(values) % IDS, lengths=lengths[:, begin:end].flatten())


def upstream_of(step: int, features: KeyedJaggedTensor, pooled: bool) -> list[Tensor]:
    """Gradients of the outputs of a whole batch."""
    draw = torch.Generator().manual_seed(100 + step)
    sizes = [SAMPLES if pooled else features[name].values().shape[0] for name in "fgh"]
    return [torch.randn(size, DIM, generator=draw) for size in sizes]


def part_of(tensors: list[Tensor], features: KeyedJaggedTensor, begin: int, end: int, pooled: bool) -> list[Tensor]:
    """What of the rows of a whole batch belongs to samples [begin, end)."""
    if pooled:
        return [tensor[begin:end] for tensor in tensors]
    offsets = [features[name].offsets().tolist() for name in "fgh"]
    return [tensor[at[begin] : at[end]] for tensor, at in zip(tensors, offsets, strict=True)]


def span() -> tuple[int, int]:
    per_rank = SAMPLES // dist.get_world_size()
    return dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank


def plan_of(model: Net, strategy: str) -> ShardingPlan:
    world = dist.get_world_size()
    both = list(range(min(world, 2)))
    kinds: Any = {
        "table_wise": {"a": table_wise(world - 1), "b": table_wise(0)},
        "column_wise": {"a": column_wise(both), "b": table_wise(world - 1)},
        "one_rank": {"a": column_wise([0, 0]), "b": table_wise(0)},
        "row_wise": {"a": row_wise(), "b": row_wise()},
        "mixed": {"a": row_wise(), "b": column_wise(both)},
        "data_parallel": {"a": data_parallel(), "b": table_wise(0)},
    }
    cut = construct_module_sharding_plan(model.mc, kinds[strategy], world_size=world, device_type="cpu")
    return ShardingPlan({"mc": cut})


def pieces_of(state: dict[str, Any]) -> dict[str, list[tuple[list[int], Tensor]]]:
    """Each value's local parts and where they begin."""
    pieces = {}
    for name, value in state.items():
        if hasattr(value, "local_shards"):
            pieces[name] = [(shard.metadata.shard_offsets, shard.tensor.clone()) for shard in value.local_shards()]
        else:
            pieces[name] = [([0] * value.dim(), value.clone())]
    return pieces


def steps_of(model: Any, pooled: bool, steps: range, part: tuple[int, int], ranks: int = 1) -> list[list[Tensor]]:
    """Outputs of some samples in training steps; at the end, if there are no more steps, of one in eval()."""
    outputs = []
    for step in steps:
        whole = batch_of(step)
        embeddings = model(batch_of(step, *part))
        upstream = part_of(upstream_of(step, whole, pooled), whole, *part, pooled)
        torch.autograd.backward(embeddings, [grad * ranks for grad in upstream])
        outputs.append([out.detach() for out in embeddings])
    if steps.stop == STEPS:
        model.eval()
        with torch.no_grad():
            outputs.append([out.detach() for out in model(batch_of(STEPS, *part))])
    return outputs


def states_by_name(fused: Any, prefix: str = "") -> dict[str, Any]:
    of_params = fused.state_dict()["state"]
    return {f"{prefix}{name}.{key}": value for name, of in of_params.items() for key, value in of.items()}


def sharded(pooled: bool, strategy: str) -> Any:
    model = Net(pooled, return_remapped_features=True)
    dmp = DistributedModelParallel(model, plan=plan_of(model, strategy))
    assert isinstance(model.mc, ShardedManagedCollisionEmbeddings)
    return dmp


def trained(pooled: bool, strategy: str, reload: int | None) -> Any:
    """Outputs of a rank in each step, its state, and the optimizer's; at `reload` another model goes on."""
    dmp, world = sharded(pooled, strategy), dist.get_world_size()
    outputs = steps_of(dmp, pooled, range(reload or STEPS), span(), world)
    slots = bags_of(dmp.module.remapped)
    if reload is not None:
        torch.manual_seed(99)
        other = sharded(pooled, strategy)
        # its maps have seen another batch
        other(batch_of(50, *span()))
        other.module.remapped.clear()
        other.load_state_dict(dmp.state_dict())
        other.fused_optimizer.load_state_dict(dmp.fused_optimizer.state_dict())
        dmp = other
        outputs += steps_of(dmp, pooled, range(reload, STEPS), span(), world)
        slots += bags_of(dmp.module.remapped)
    return outputs, pieces_of(dmp.state_dict()), pieces_of(states_by_name(dmp.fused_optimizer)), slots


def bags_of(batches: Sequence[KeyedJaggedTensor]) -> list[dict[str, list[list[int]]]]:
    """The ids of each bag, by key."""
    assert all(isinstance(batch, KeyedJaggedTensor) for batch in batches)
    return [
        {key: [ids.tolist() for ids in batch[key].to_dense()] for key in batch.keys()}  # noqa: SIM118
        for batch in batches
    ]


def require_slots(ranks: Sequence[Any], whole: Sequence[KeyedJaggedTensor]) -> None:
    """The remapped ids of each rank are those of its samples in one process, key by key in the order of the tables."""
    per_rank, expected = SAMPLES // len(ranks), bags_of(whole)
    assert len(expected) == STEPS + 1 and list(expected[0]) == ["f", "g", "h"]
    for rank, (*_, slots) in enumerate(ranks):
        begin, end = rank * per_rank, (rank + 1) * per_rank
        assert slots == [{key: bags[begin:end] for key, bags in batch.items()} for batch in expected]


def require_pieces(pieces: dict[str, Any], whole: dict[str, Tensor]) -> int:
    """Check this rank's parts of values by the whole ones; how many there are."""
    count = 0
    for name, parts in pieces.items():
        for offsets, part in parts:
            expected = whole[name]
            if part.dim() == 1 and offsets[0] >= expected.shape[0]:
                # the second column block of a table has the map of the first
                offsets = [offsets[0] - expected.shape[0]]
            cut = tuple(slice(low, low + size) for low, size in zip(offsets, part.shape, strict=True))
            assert torch.equal(part, expected[cut]), name
            count += 1
    return count


def alone(pooled: bool) -> tuple[list[list[Tensor]], dict[str, Tensor], dict[str, Tensor], list[KeyedJaggedTensor]]:
    model = Net(pooled, return_remapped_features=True)
    outputs = steps_of(model, pooled, range(STEPS), (0, SAMPLES))
    collection = model.mc._embedding_module
    states = states_by_name(collection.fused_optimizer(), "mc._embedding_module.")
    return outputs, model.state_dict(), states, model.remapped


def require_outputs(ranks: Sequence[Any], outputs: list[list[Tensor]], pooled: bool, tolerance: float = 0.0) -> None:
    """Those of all ranks are their samples' of one process."""
    per_rank = SAMPLES // len(ranks)
    for rank, (rank_outputs, *_) in enumerate(ranks):
        for step, step_outputs in enumerate(rank_outputs):
            expected = part_of(outputs[step], batch_of(step), rank * per_rank, (rank + 1) * per_rank, pooled)
            close = [torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(step_outputs, expected, strict=True)]
            assert all(close), (rank, step)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize(
    ("strategy", "world", "reload"),
    [
        ("table_wise", 1, None), ("table_wise", 2, None), ("table_wise", 2, 4), ("column_wise", 2, None),
        ("column_wise", 2, 4), ("one_rank", 2, None), ("table_wise", 4, None),
    ],
)  # fmt: skip
def test_a_table_that_is_whole_or_cut_by_columns_has_the_bits_of_one_process(
    strategy: str, world: int, reload: int | None, pooled: bool
) -> None:
    outputs, weights, states, slots = alone(pooled)
    counted, ranks = 0, run_ranks(world, trained, pooled, strategy, reload)
    require_outputs(ranks, outputs, pooled)
    require_slots(ranks, slots)
    for _, shards, fused, _ in ranks:
        assert set(shards) <= set(weights)
        assert {name for name in weights if "_mch" in name or name.endswith("weight")} <= set(shards)
        counted += require_pieces(shards, weights) + require_pieces(fused, states)
    assert counted >= 12


def uneven() -> KeyedJaggedTensor:
    """A batch whose features kept 2, 1 and 3 of 4 samples."""
    lengths = torch.tensor([2, 0, 1, 1, 1, 0])
    inverse = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [2, 1, 0, 0]])
    ids = torch.tensor([5, 71, 5, 142, 5, 76][: int(lengths.sum())])
    strides = [[2], [1], [3]]
    return KeyedJaggedTensor(
        ["h", "g", "f"], ids, lengths=lengths, stride_per_key_per_rank=strides,
        inverse_indices=(["h", "g", "f"], inverse),
    )  # fmt: skip


def mapped_unevenly(pooled: bool) -> Any:
    """Slots and rows of a batch of uneven features, in eval() after a step."""
    dmp = sharded(pooled, "mixed")
    dmp(batch_of(0, *span()))
    dmp.eval()
    with torch.no_grad():
        outputs = dmp(uneven())
    return outputs, dmp.module.remapped[-1].wait()


class Ranges:
    """A table cut into `parts` row shards, in one process: a module and a range of slots for each range of ids."""

    def __init__(self, whole: MCHManagedCollisionModule, rows: int, parts: int) -> None:
        size = -(-rows // parts)
        ends = [min(size * k, rows) for k in range(parts + 1)]
        self.modules = [whole.rebuild_with_output_id_range((a, b), ends) for a, b in zip(ends, ends[1:], strict=False)]
        self.ends, self.block = ends, -(-whole.input_size() // parts)

    def slots(self, table: str, ids: Tensor) -> Tensor:
        slots = torch.empty_like(ids)
        for part, module in enumerate(self.modules):
            inside = ids // self.block == part
            features = {table: JaggedTensor(ids[inside], lengths=torch.tensor([int(inside.sum())]))}
            slots[inside] = module.remap(module.profile(features))[table].values()
        return slots

    def evictions(self) -> list[tuple[int, Tensor, int]]:
        """First slot of each part, slots that got other ids, and batches seen."""
        evictions = []
        for module, low in zip(self.modules, self.ends, strict=False):
            evicted = module.evict()
            if evicted is not None and evicted.numel():
                evictions.append((low, evicted, module.batches_seen()))
        return evictions


def alone_in_ranges(
    pooled: bool, parts: dict[str, int]
) -> tuple[list[list[Tensor]], dict[str, Tensor], list[KeyedJaggedTensor]]:
    model, outputs, remapped = Net(pooled), [], []
    maps, collection = model.mc._managed_collision_collection.modules_by_table(), model.mc._embedding_module
    ranges = {name: Ranges(maps[name], ROWS[name], parts[name]) for name in ROWS}
    for step in range(STEPS + 1):
        if step == STEPS:
            [module.eval() for table_ranges in ranges.values() for module in table_ranges.modules]

        def slots(table: str, ids: JaggedTensor) -> JaggedTensor:
            raw = hashed(ids.values(), IDS) if table == "b" else ids.values()
            return JaggedTensor(ranges[table].slots(table, raw), lengths=ids.lengths())

        batch = change_ids(batch_of(step), collection._configs, slots)
        remapped.append(batch)
        for config in collection._configs:
            for low, evicted, count in ranges[config.name].evictions():
                collection.renew_rows(config.name, evicted, fresh_rows(config, evicted.numel(), count, first_row=low))
        embeddings = collection(batch)
        outs = [embeddings[name] if pooled else embeddings[name].values() for name in "fgh"]
        if step < STEPS:
            torch.autograd.backward(outs, upstream_of(step, batch_of(step), pooled))
        outputs.append([out.detach() for out in outs])
    state = {f"mc._embedding_module.{name}": value for name, value in collection.state_dict().items()}
    for name, table_ranges in ranges.items():
        for key in table_ranges.modules[0].state_dict():
            values = [module.state_dict()[key] for module in table_ranges.modules]
            joined = torch.cat(values) if key.startswith("_mch") else values[0]
            state[f"mc._managed_collision_collection._managed_collision_modules.{name}.{key}"] = joined
    return outputs, state, remapped


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize(
    ("strategy", "world", "reload"),
    [("row_wise", 1, None), ("row_wise", 2, None), ("row_wise", 2, 4), ("row_wise", 4, None), ("mixed", 2, None)],
)
def test_row_shards_have_the_slots_of_a_process_for_each_range_of_ids(
    strategy: str, world: int, reload: int | None, pooled: bool
) -> None:
    parts = {"a": world, "b": world if strategy == "row_wise" else 1}
    outputs, weights, slots = alone_in_ranges(pooled, parts)
    ranks = run_ranks(world, trained, pooled, strategy, reload)
    # a bag whose ids lie on several ranks is added in another order
    require_outputs(ranks, outputs, pooled, 1e-6 if pooled else 0.0)
    require_slots(ranks, slots)
    for _, shards, *_ in ranks:
        require_pieces(shards, weights)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_slots_of_features_with_batch_sizes_of_their_own_come_back(pooled: bool) -> None:
    """TorchRec refuses such a pooled batch."""
    model = Net(pooled)
    maps = model.mc._managed_collision_collection.modules_by_table()
    ranges = {name: Ranges(maps[name], ROWS[name], 2 if name == "a" else 1) for name in ROWS}

    def slots(table: str, ids: JaggedTensor) -> JaggedTensor:
        raw = hashed(ids.values(), IDS) if table == "b" else ids.values()
        return JaggedTensor(ranges[table].slots(table, raw), lengths=ids.lengths())

    change_ids(batch_of(0), model.mc._embedding_module._configs, slots)
    [module.eval() for table_ranges in ranges.values() for module in table_ranges.modules]
    expected = change_ids(uneven(), model.mc._embedding_module._configs, slots)
    for outputs, remapped in run_ranks(2, mapped_unevenly, pooled):
        assert remapped.keys() == ["f", "g", "h"] and remapped.stride_per_key() == [3, 1, 2]
        assert torch.equal(remapped.values(), expected.values()) and torch.equal(remapped.lengths(), expected.lengths())
        assert len(set(remapped.values().tolist())) == 3 and len(outputs) == 3


def differing() -> str:
    model = Net(True, return_remapped_features=dist.get_rank() == 1)
    return error_of(lambda: DistributedModelParallel(model, plan=plan_of(model, "table_wise")))


def test_ranks_that_differ_in_whether_slots_come_back_are_told() -> None:
    """The rank that asked for slots waited for the others', who took its exchange for that of rows: a hang or bytes of
    another thing, in the first step."""
    for error in run_ranks(2, differing, timeout=60.0):
        assert "return_remapped_features: rank 0 has False, rank 1 has True" in error, error


def refused() -> list[str]:
    errors = []

    def attempt(make: Any) -> None:
        with pytest.raises((ValueError, TypeError, IndexError, RankFailure)) as caught:
            make()
        errors.append(str(caught.value))

    def shard(strategy: str, model: Net | None = None, **settings: Any) -> Any:
        model = model or Net(True, **settings)
        return DistributedModelParallel(model, plan=plan_of(model, strategy))

    attempt(lambda: shard("data_parallel"))
    learned = Net(True)
    learned(batch_of(0))
    attempt(lambda: shard("row_wise", learned))
    bad = shard("row_wise")
    batch = batch_of(0, *span())
    if dist.get_rank() == 1:
        batch = KeyedJaggedTensor(batch.keys(), batch.values() + IDS, lengths=batch.lengths())
    attempt(lambda: bad(batch))
    # the last one: it closes the process group
    inner = DistributedModelParallel(Net(True), sharders=[EmbeddingBagCollectionSharder()])
    attempt(lambda: inner(batch_of(0)))
    return errors


@pytest.mark.full
def test_what_ranks_cannot_do_is_refused_by_name() -> None:
    for errors in run_ranks(2, refused):
        assert "table 'a': an id map gives out rows of one rank, but every rank holds them" in errors[0]
        assert "table 'a': its managed collision module has learned ids" in errors[1]
        assert "rank 1: " in errors[2] and f"is outside [0, {IDS})" in errors[2]
        assert "its collection was sharded or quantized without it" in errors[3]


def test_every_default_list_of_sharders_has_those_of_managed_collision() -> None:
    for pooled in (True, False):
        sharder = sharder_of(Net(pooled).mc, get_default_sharders())
        assert sharder is not None and sharder.module_type is type(Net(pooled).mc)
        kinds = ["table_wise", "column_wise", "table_column_wise", "row_wise"]
        assert sorted(sharder.sharding_types("cpu")) == sorted(kinds)
    assert ManagedCollisionCollectionSharder().module_type is ManagedCollisionCollection


def planned() -> list[str]:
    """A plan of our own making serves the module."""
    dmp = DistributedModelParallel(Net(True))
    dmp(batch_of(0, *span()))
    return sorted({str(sharding.sharding_type) for sharding in dmp.plan.plan["mc"].values()})


def test_the_planner_plans_it() -> None:
    for kinds in run_ranks(2, planned):
        assert set(kinds) <= {"table_wise", "column_wise", "table_column_wise", "row_wise"}


def piped(pipeline: str, evaluated: Sequence[int] = ()) -> tuple[list[Tensor], dict[str, Any], Any]:
    """Losses, state and slots of a net trained by a plain loop or a pipeline, and in eval() in some steps."""
    model = Net(True, return_remapped_features=True)
    # without a hash the module takes what the batch has, and its ids leave ahead
    for module in model.mc._managed_collision_collection.modules_by_table().values():
        module._input_hash_func = None
    dmp = DistributedModelParallel(model, plan=plan_of(model, "mixed"))

    def losses_of(batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = sum(out.sin().sum() for out in dmp(batch))
        assert isinstance(loss, Tensor)
        return loss, loss.detach()

    batches = [batch_of(step, *span()) for step in range(STEPS)]
    losses = []
    if pipeline == "plain":
        for step, batch in enumerate(batches):
            dmp.train(step not in evaluated)
            loss, value = losses_of(batch)
            if dmp.training:
                loss.backward()
            losses.append(value)
    else:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        make: Any = {
            "sparse": TrainPipelineSparseDist, "prefetch": PrefetchTrainPipelineSparseDist,
            "fused": TrainPipelineFusedSparseDist, "semi": partial(TrainPipelineSemiSync, start_batch=0),
        }[pipeline]  # fmt: skip
        steps, source = make(dmp, optimizer, "cpu", custom_model_fwd=losses_of), iter(batches)
        for step in range(len(batches)):
            dmp.train(step not in evaluated)
            losses.append(steps.progress(source))
    return losses, pieces_of(dmp.state_dict()), bags_of(model.remapped)


@pytest.mark.filterwarnings("ignore:module .* is looked up in its step, with the newest rows. its ids are mapped")
@pytest.mark.parametrize("evaluated", [(), (2, 4)])
def test_pipelines_train_to_the_bits_of_a_plain_loop(evaluated: tuple[int, ...]) -> None:
    """A pipeline that prefetches mapped a batch's ids in the step before: where the model then went to eval(), the ids
    of a batch that trained nothing had got slots, and rows of others began anew. Those that look up ahead leave it to
    the step.
    """
    plain = run_ranks(2, piped, "plain", evaluated)
    for pipeline in ("sparse", "prefetch", "fused", "semi"):
        ranks = run_ranks(2, piped, pipeline, evaluated)
        for (losses, state, slots), (expected, weights, expected_slots) in zip(ranks, plain, strict=True):
            assert torch.equal(torch.stack(losses), torch.stack(expected))
            assert slots == expected_slots and len(slots) == STEPS
            for name, parts in state.items():
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(parts, weights[name], strict=True))


def said_of_hashed_ids() -> list[str]:
    """What a pipeline says of a collection that hashes its ids itself, which fx does not trace."""
    dmp = sharded(True, "mixed")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    make: Any = PrefetchTrainPipelineSparseDist
    pipeline = make(dmp, optimizer, "cpu", custom_model_fwd=lambda batch: (sum(out.sum() for out in dmp(batch)), None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.progress(iter([batch_of(number, *span()) for number in range(3)]))
    return [str(warning.message) for warning in caught if "not pipelined" in str(warning.message)]


def test_an_error_of_the_trace_is_no_batch() -> None:
    """Managed collision with an `input_hash_func`, too, was said to have an input that does not depend on the batch."""
    for (message,) in run_ranks(2, said_of_hashed_ids):
        assert "what makes it of the batch cannot run ahead: symbolically traced variables cannot be used" in message


def one_table(rows: int, cut: Any, world: int, **settings: Any) -> tuple[ManagedCollisionEmbeddingCollection, Any]:
    """A table whose slots are given anew with each batch, and its plan."""
    table = EmbeddingConfig(rows, 4, "t", feature_names=["f"], **settings)
    module = MCHManagedCollisionModule(rows, "cpu", LRU_EvictionPolicy(), 1, name="t")
    mc = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection([table]), ManagedCollisionCollection({"t": module}, [table])
    )
    apply_optimizer_in_backward(torch.optim.SGD, mc.parameters(), {"lr": 0.1})
    return mc, construct_module_sharding_plan(mc, {"t": cut}, world_size=world, device_type="cpu")


def wide() -> list[list[int]]:
    """Slots given to ids of the whole int64 range, by each rank."""
    mc, plan = one_table(8, row_wise(), dist.get_world_size())
    dmp = DistributedModelParallel(mc, plan=ShardingPlan({"": plan}))
    rows, _ = dmp(kjt({"f": [[0, 2**62, 2**63 - 2, 5]]}))
    assert rows["f"].values().shape == (4, 4)
    name = "_managed_collision_collection._managed_collision_modules.t._mch_sorted_raw_ids"
    local = dmp.state_dict()[name].local_shards()[0]
    return [local.metadata.shard_offsets, local.tensor.tolist()]


def test_row_shards_divide_ids_of_64_bits() -> None:
    free = 2**63 - 1
    assert run_ranks(2, wide) == [[[0], [0, 5, free, free]], [[4], [2**62, 2**63 - 2, free, free]]]


@pytest.fixture
def on_one_rank() -> ShardedManagedCollisionEmbeddings:
    """Four slots, given anew with each batch and of value 0.5 each time."""
    mc, plan = one_table(4, table_wise(0), 1, init_fn=lambda rows: rows.fill_(0.5))
    return ManagedCollisionEmbeddingCollectionSharder().shard(mc, plan, ShardingEnv.from_local(1, 0))


def test_ids_of_a_batch_stay_as_they_are(on_one_rank: ShardedManagedCollisionEmbeddings) -> None:
    """On one rank ids do not travel, and slots were written over those of the caller's batch."""
    batch = kjt({"f": [[7, 8, 9]]})
    on_one_rank(batch)
    assert batch.values().tolist() == [7, 8, 9]


def test_a_batch_that_is_dropped_leaves_no_row_of_other_ids(on_one_rank: ShardedManagedCollisionEmbeddings) -> None:
    """Its ids had slots from then on, whose rows were still those of the ids that had lost them."""
    rows, _ = on_one_rank(kjt({"f": [[1, 2, 3]]}))
    rows["f"].values().sum().backward()
    engine = on_one_rank._embedding_module
    step = engine.start(kjt({"f": [[7, 8, 9]]}))
    engine.send_ids(step)
    engine.receive_ids(step)
    engine.drop(step)
    on_one_rank.eval()
    assert on_one_rank(kjt({"f": [[7, 8, 9]]}))[0]["f"].values().tolist() == [[0.5] * 4] * 3


def saved(folder: str, strategy: str) -> bool:
    """Whether a net loaded by torch.distributed.checkpoint goes on with the bits of the one that was saved."""
    source, restored = sharded(True, strategy), sharded(True, strategy)
    for step in range(4):
        torch.autograd.backward([out.sum() for out in source(batch_of(step, *span()))])
    dcp.save(source.state_dict(), checkpoint_id=folder)
    state = restored.state_dict()
    dcp.load(state, checkpoint_id=folder)
    restored.load_state_dict(state)
    source.eval()
    restored.eval()
    with torch.no_grad():
        outputs, expected = restored(batch_of(4, *span())), source(batch_of(4, *span()))
    return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("strategy", ["table_wise", "column_wise", "row_wise"])
def test_torch_distributed_checkpoint_saves_and_loads_maps(strategy: str, tmp_path: Path) -> None:
    assert run_ranks(2, saved, str(tmp_path), strategy) == [True, True]
