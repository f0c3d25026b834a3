"""Embeddings between ranks as differentiable functions: values and gradients of real ranks beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import gradient_of, kjt
from model_zoo import bag_tables, fused
from ranks import run_ranks, world_group
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import EmbeddingBagCollection, ShardingEnv
from shardwise.sharding import EmbeddingBagCollectionSharder, construct_module_sharding_plan, table_wise
from shardwise.sharding.comms.awaitable import Awaitable
from shardwise.sharding.comms.qcomms import (
    CommType,
    QCommsConfig,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    get_qcomm_codecs,
)
from shardwise.sharding.torchrec import comm_ops, pooled_dist
from shardwise.sharding.torchrec.comm_ops import (
    all_gather_base_pooled,
    alltoall_pooled,
    alltoall_sequence,
    reduce_scatter_base_pooled,
    reduce_scatter_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
    variable_batch_alltoall_pooled,
)

pytestmark = pytest.mark.ranks
WORLDS = [1, 2, 4]


@dataclass(frozen=True)
class Case:
    """`shape` of rank r's input; what rank r calls on it; and what all ranks' inputs become, in one process."""

    shape: Callable[[int, int], Sequence[int]]
    call: Callable[[Tensor, int, int, Any], Awaitable[Tensor]]
    whole: Callable[[list[Tensor]], list[Tensor]]
    # whether what comes is a sum of what ranks sent
    sums: bool = False


def batches(world: int) -> list[int]:
    return [(3, 0, 5, 1)[r % 4] for r in range(world)]


def dims(world: int) -> list[int]:
    return [(4, 2, 0, 3)[r % 4] for r in range(world)]


def feature_dims(world: int) -> list[list[int]]:
    """Widths of each rank's features; rank 2 has none."""
    return [[(4, 2), (3,), (), (1, 5)][r % 4] for r in range(world)]  # type: ignore[misc]


def feature_batches(world: int) -> list[list[list[int]]]:
    """[rank of the batch][rank of the feature][features]."""
    return [
        [[(2 * r + 3 * o + f) % 4 for f in range(len(widths))] for o, widths in enumerate(feature_dims(world))]
        for r in range(world)
    ]


def whole_pooled(inputs: list[Tensor]) -> list[Tensor]:
    by_owner = [torch.split(tensor, batches(len(inputs))) for tensor in inputs]
    return [torch.cat([blocks[r] for blocks in by_owner], 1) for r in range(len(inputs))]


def variable_splits(world: int) -> list[list[int]]:
    """[owner][rank of the batch] numbers."""
    sizes, widths = feature_batches(world), feature_dims(world)
    return [
        [sum(b * d for b, d in zip(sizes[r][o], widths[o], strict=True)) for r in range(world)] for o in range(world)
    ]


def call_variable(x: Tensor, rank: int, world: int, codecs: Any) -> Awaitable[Tensor]:
    sizes = feature_batches(world)
    before = [b for of_owner in sizes[rank] for b in of_owner]
    return variable_batch_alltoall_pooled(x, [row[rank] for row in sizes], before, feature_dims(world), codecs=codecs)


def whole_variable(inputs: list[Tensor]) -> list[Tensor]:
    pieces = [torch.split(tensor, n) for tensor, n in zip(inputs, variable_splits(len(inputs)), strict=True)]
    return [torch.cat([blocks[r] for blocks in pieces]) for r in range(len(inputs))]


def whole_splits(splits: Callable[[int], list[int]]) -> Callable[[list[Tensor]], list[Tensor]]:
    def whole(inputs: list[Tensor]) -> list[Tensor]:
        pieces = [torch.split(tensor, splits(len(inputs))) for tensor in inputs]
        return [reduce(torch.add, [blocks[r] for blocks in pieces]) for r in range(len(inputs))]

    return whole


def per_feature(world: int) -> list[list[int]]:
    return [[r + 1, (2 * r) % 3] for r in range(world)]


def per_feature_splits(world: int) -> list[int]:
    return [4 * a + 3 * b for a, b in per_feature(world)]


CASES = {
    "pooled": Case(
        lambda r, w: (sum(batches(w)), dims(w)[r]),
        lambda x, r, w, c: alltoall_pooled(x, batches(w), dims(w), codecs=c),
        whole_pooled,
    ),
    "variable_batch": Case(lambda r, w: (sum(variable_splits(w)[r]),), call_variable, whole_variable),
    "reduce_scatter": Case(
        lambda r, w: (sum(batches(w)), 3),
        lambda x, r, w, c: reduce_scatter_pooled(torch.split(x, batches(w)), codecs=c),
        whole_splits(batches),
        sums=True,
    ),
    "reduce_scatter_base": Case(
        lambda r, w: (2 * w, 3),
        lambda x, r, w, c: reduce_scatter_base_pooled(x, codecs=c),
        whole_splits(lambda w: [2] * w),
        sums=True,
    ),
    "reduce_scatter_v": Case(
        lambda r, w: (sum(batches(w)), 3),
        lambda x, r, w, c: reduce_scatter_v_pooled(x, batches(w), codecs=c),
        whole_splits(batches),
        sums=True,
    ),
    "reduce_scatter_v_per_feature": Case(
        lambda r, w: (sum(per_feature_splits(w)),),
        lambda x, r, w, c: reduce_scatter_v_per_feature_pooled(x, per_feature(w), [4, 3], codecs=c),
        whole_splits(per_feature_splits),
        sums=True,
    ),
    "all_gather": Case(
        lambda r, w: (2, 3),
        lambda x, r, w, c: all_gather_base_pooled(x, codecs=c),
        lambda inputs: [torch.cat(inputs)] * len(inputs),
    ),
}


def whole_and_gradients(
    case: Case, world: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, outputs, upstream gradients and gradients of the inputs of all ranks, in one process."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(*case.shape(r, world), generator=generator).to(dtype).requires_grad_() for r in range(world)]
    outputs = case.whole(inputs)
    up = [torch.randn(output.shape, generator=generator).to(dtype) for output in outputs]
    gradients = torch.autograd.grad(outputs, inputs, up)
    return inputs, outputs, up, list(gradients)


def exchanged(
    name: str, dtype: torch.dtype = torch.float32, codecs: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What came to this rank and what should have, the gradient of its input and that of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, outputs, up, gradients = whole_and_gradients(CASES[name], world, dtype)
    x = inputs[rank].detach().clone().requires_grad_()
    output = CASES[name].call(x, rank, world, codecs).wait()
    output.backward(up[rank])
    return output, outputs[rank], gradient_of(x), gradients[rank]


def check_cases(dtype: torch.dtype, sync: bool, division: bool) -> None:
    comm_ops.set_gradient_division(division)
    comm_ops.set_use_sync_collectives(sync)
    try:
        for name, case in CASES.items():
            output, wanted, gradient, wanted_gradient = exchanged(name, dtype)
            if dtype.itemsize < 4 and case.sums:
                # sums of narrow numbers are rounded once
                assert_close(output, wanted, rtol=2e-2, atol=2e-2, msg=name)
            else:
                # the bits of adding rank after rank
                assert torch.equal(output, wanted), name
            wanted_gradient = wanted_gradient / (dist.get_world_size() if division else 1)
            assert_close(gradient, wanted_gradient, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], msg=name)
    finally:
        comm_ops.set_gradient_division(True)
        comm_ops.set_use_sync_collectives(False)


TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_all() -> None:
    check_cases(torch.float32, sync=False, division=True)
    check_cases(torch.float32, sync=True, division=False)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        check_cases(dtype, sync=False, division=True)


@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients_are_those_of_one_process(world: int) -> None:
    run_ranks(world, check_all)


class Halves(QuantizedCommCodec[None]):
    """A codec of a user."""

    quantized_dtype = torch.float16  # type: ignore[assignment]

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        return input_tensor.half()

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        return input_grad.float()

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len


def check_codecs() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    fp16, int8 = CommType.FP16, CommType.INT8
    for forward, codecs in (
        (1e-3, get_qcomm_codecs(QCommsConfig(fp16, CommType.BF16))),
        (1e-3, get_qcomm_codecs(QCommsConfig(fp16, fp16, backward_loss_scale=16.0))),
        (3e-2, get_qcomm_codecs(QCommsConfig(int8, int8))),
        (1e-3, QuantizedCommCodecs(Halves(), Halves())),
    ):
        for name in CASES:
            output, wanted, gradient, wanted_gradient = exchanged(name, codecs=codecs)
            assert output.dtype is torch.float32
            assert_close(output, wanted, rtol=forward * world, atol=forward * world, msg=name)
            assert world == 1 or output.numel() == 0 or not torch.equal(output, wanted), f"{name} was not compressed"
            assert_close(gradient, wanted_gradient / world, rtol=5e-2, atol=5e-2, msg=name)
    x = torch.full((world, 2), 1e6 if rank == 1 else 1.0)
    pending = reduce_scatter_base_pooled(x, codecs=get_qcomm_codecs(QCommsConfig(fp16, fp16)))
    if world > 1:
        with pytest.raises(OverflowError, match=r"ranks \[1\].*fp16"):
            pending.wait()


@pytest.mark.parametrize("world", [1, 2])
def test_codecs_compress_every_exchange_and_what_does_not_fit_raises_on_all_ranks(world: int) -> None:
    run_ranks(world, check_codecs)


def check_backward_again_and_without_gradients() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((world, 2), 1.0 + rank, requires_grad=True)
    twice = reduce_scatter_base_pooled(x * 2).wait()
    twice.sum().backward(retain_graph=True)
    twice.sum().backward()
    assert torch.equal(gradient_of(x), torch.full_like(x, 4.0 / world))
    with torch.no_grad():
        assert not reduce_scatter_base_pooled(x).wait().requires_grad
    pending = reduce_scatter_base_pooled(x)
    with torch.no_grad():
        output = pending.wait()
    # who waits first, say to print, takes nothing from the others
    assert output.requires_grad
    assert pending.wait() is output


def test_backward_runs_as_often_as_asked_and_no_grad_belongs_to_the_call() -> None:
    run_ranks(2, check_backward_again_and_without_gradients)


def check_modules() -> None:
    rank, world, pg = dist.get_rank(), dist.get_world_size(), world_group()
    inputs, outputs, up, gradients = whole_and_gradients(CASES["pooled"], world, torch.float32)
    x = inputs[rank].detach().clone().requires_grad_()
    dist_pooled = pooled_dist.PooledEmbeddingsAllToAll(pg, dims(world), callbacks=[lambda t: t * 2])
    dist_pooled.callbacks.append(lambda t: t + 1)
    pending = dist_pooled(x, batches(world))
    pending.callbacks.append(lambda t: t * 4)
    output = pending.wait()
    assert torch.equal(output, (outputs[rank] * 2 + 1) * 4)
    output.backward(up[rank])
    assert_close(gradient_of(x), gradients[rank] * 8 / world)
    # by default all batches are alike
    even = torch.arange(2.0 * world * dims(world)[rank]).view(2 * world, dims(world)[rank])
    assert dist_pooled(even).wait().shape == (2, sum(dims(world)))
    with pytest.raises(ValueError, match="batch_size_per_rank" if world > 1 else "shape"):
        dist_pooled(torch.zeros(2 * world + 1, 99))

    batch_sizes = feature_batches(world)
    before = [b for of_owner in batch_sizes[rank] for b in of_owner]
    variable = pooled_dist.VariableBatchPooledEmbeddingsAllToAll(pg, feature_dims(world), callbacks=[lambda t: t * 2])
    scatter = pooled_dist.PooledEmbeddingsReduceScatter(pg)
    features = pooled_dist.VariableBatchPooledEmbeddingsReduceScatter(pg)
    calls: dict[str, Callable[[Tensor], Awaitable[Tensor]]] = {
        "variable_batch": lambda x: variable(x, [sizes[rank] for sizes in batch_sizes], before),
        "reduce_scatter_v": lambda x: scatter(x, batches(world)),
        "reduce_scatter_base": lambda x: scatter(x),
        "reduce_scatter_v_per_feature": lambda x: features(x, per_feature(world), [4, 3]),
        "all_gather": pooled_dist.PooledEmbeddingsAllGather(pg),
    }
    for name, call in calls.items():
        inputs, outputs, _, _ = whole_and_gradients(CASES[name], world, torch.float32)
        assert torch.equal(call(inputs[rank]).wait(), outputs[rank] * (2 if name == "variable_batch" else 1)), name


@pytest.mark.parametrize("world", [1, 2, 4])
def test_modules_call_the_functions_and_run_callbacks_on_the_result(world: int) -> None:
    run_ranks(world, check_modules)


def step_of_a_collection(division: bool) -> Tensor:
    world, tables = dist.get_world_size(), bag_tables({"f": 4}, 2, init_fn=nn.init.zeros_)
    module = fused(EmbeddingBagCollection(tables), lr=1.0)
    plan = construct_module_sharding_plan(module, {"tf": table_wise(0)}, world_size=world, local_size=world)
    sharded = EmbeddingBagCollectionSharder().shard(module, plan, ShardingEnv.from_process_group(world_group()))
    comm_ops.set_gradient_division(division)
    try:
        sharded(kjt({"f": [[1]]})).values().sum().backward()
    finally:
        comm_ops.set_gradient_division(True)
    return sharded.parameter("tf").detach().clone()


def test_sharded_collections_divide_their_gradients_as_set_gradient_division_says() -> None:
    """TorchRec's one setting holds for its sharded collections too; ours went on dividing."""
    for division, wanted in ((True, -1.0), (False, -2.0)):
        assert run_ranks(2, step_of_a_collection, division)[0][1].tolist() == [wanted] * 2


def check_refusals() -> None:
    x = torch.zeros(4, 3)
    ones = torch.ones(2, 2, dtype=torch.int32)
    for words, call in (
        ("all_to_all_single_comm", lambda: alltoall_pooled(x, [2, 2], [3, 3], all_to_all_single_comm=object())),
        ("batch_size_per_rank must have one entry for each of 2 ranks, got 1", lambda: alltoall_pooled(x, [4], [3, 3])),
        ("shape", lambda: alltoall_pooled(x, [2, 3], [3, 3])),
        ("reduce_scatter_v_pooled takes", lambda: reduce_scatter_base_pooled(torch.zeros(3, 2))),
        ("inputs must have one entry for each of 2 ranks", lambda: reduce_scatter_pooled([x])),
        ("number for each of 2 features", lambda: reduce_scatter_v_per_feature_pooled(x, [[1], [2]], [1, 2])),
        ("this rank's 1 features", lambda: variable_batch_alltoall_pooled(x, [[1, 1], [1, 1]], [1, 1], [[2], [2]])),
        ("each of 2 features", lambda: variable_batch_alltoall_pooled(x, [[1], [1]], [1], [[2], [2]])),
        ("matrix", lambda: alltoall_sequence(x[0], None, None, ones, [1, 1], [1, 2])),
        ("must be a QuantizedCommCodecs", lambda: all_gather_base_pooled(x, codecs=torch)),  # type: ignore[arg-type]
        ("without dimensions", lambda: all_gather_base_pooled(torch.tensor(1.0))),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    run_ranks(2, check_refusals)


def test_settings_are_remembered_and_a_block_of_sync_collectives_ends() -> None:
    assert comm_ops.get_gradient_division()
    with pytest.raises(KeyError), comm_ops.torchrec_use_sync_collectives():
        assert comm_ops.get_use_sync_collectives()
        raise KeyError
    assert not comm_ops.get_use_sync_collectives()


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        all_gather_base_pooled(torch.zeros(1))


def test_tensors_of_several_devices_of_one_process_meet_on_one() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    assert pooled_dist.EmbeddingsAllToOne("cpu", 2, 1)([a, b]).tolist() == [[1, 2, 3, 4]]
    assert pooled_dist.EmbeddingsAllToOne("cpu", 2, 0)([a, b]).tolist() == [[1, 2], [3, 4]]
    assert pooled_dist.EmbeddingsAllToOne("cpu", 2, 1)([a]) is a
    assert pooled_dist.EmbeddingsAllToOneReduce(torch.device("cpu"), 2)([a, b]).tolist() == [[4, 6]]
    both = pooled_dist.SeqEmbeddingsAllToOne("cpu", 2)
    both.set_device("meta")
    assert [tensor.device.type for tensor in both([a, b])] == ["meta", "meta"]
    for module in (both, pooled_dist.EmbeddingsAllToOneReduce("cpu", 2)):
        with pytest.raises(ValueError, match="2 tensors, one of each device, got 1"):
            module([a])
    with pytest.raises(ValueError, match="1 to 2 tensors"):
        pooled_dist.EmbeddingsAllToOne("cpu", 2, 1)([])
