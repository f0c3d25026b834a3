"""FBGEMM's modules of tables under what else programs do to modules: defects that were found so, and stay away."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.fbgemm_types import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SparseType,
)
from shardwise.fbgemm.tables import (
    DenseTableBatchedEmbeddingBagsCodegen,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    IntNBitTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
    generate_requests,
)
from shardwise.kernels import BoundsCheckMode

SHAPES = [(9, 8), (5, 4), (7, 8)]
BYTES = torch.ones(5, 8, dtype=torch.uint8)
IDS, OFFSETS = torch.tensor([0, 8, 3, 4, 1, 6, 2]), torch.tensor([0, 2, 3, 4, 5, 6, 7])


def tables(**settings: Any) -> SplitTableBatchedEmbeddingBagsCodegen:
    specs = [(*shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for shape in SHAPES]
    optimizer = settings.pop("optimizer", OptimType.EXACT_ROWWISE_ADAGRAD)
    module = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=optimizer, **settings)
    torch.manual_seed(0)
    module.init_embedding_weights_uniform(-1, 1)
    return module


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module,
        copy.deepcopy,
        saved_and_loaded,
        lambda module: module.half(),
        lambda module: module.to("cpu"),
        lambda module: (module.load_state_dict({}, strict=False), module)[1],
    ],
    ids=["views", "deepcopy", "pickle", "half", "to", "load"],
)
def test_replaced_memory_is_read_before_the_next_lookup(read: Callable[[Any], Any]) -> None:
    """`weights_host.data = ...` was taken into the tables by the next forward alone: views showed the rows before, and
    copies, casts and pickles kept those."""
    module: Any = tables()
    module.weights_host.data = torch.full_like(module.weights_host, 3.0)
    module.momentum1_host.data = torch.full_like(module.momentum1_host, 2.0)
    kept = read(module)
    assert all(bool((weights == 3).all()) for weights in kept.split_embedding_weights())
    assert all(bool((states["sum"] == 2).all()) for states in kept.get_optimizer_state())


@pytest.mark.parametrize("pooling_mode", PoolingMode)
def test_a_backward_trains_the_memory_that_was_put_in_place_before_it(pooling_mode: PoolingMode) -> None:
    """`weights_host.data = ...` between a forward and its backward: the update went to the memory from before, and was
    lost as the next forward took the other."""
    specs = [(9, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 3
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=OptimType.EXACT_SGD, learning_rate=1.0, pooling_mode=pooling_mode
    )
    output = module(torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    module.weights_host.data = torch.full_like(module.weights_host, 5.0)
    output.sum().backward()
    first = module.split_embedding_weights()[0]
    assert torch.equal(first[:2], torch.full_like(first[:2], 4.0)) and torch.equal(first[2:], first[2:] * 0 + 5)
    trained = sum(int((weights == 4).sum()) for weights in module.split_embedding_weights())
    assert trained == int((module.weights_host == 4).sum()) > first[:2].numel()


def test_dense_tables_look_up_in_what_functional_call_gives() -> None:
    """Tensors given to `torch.func.functional_call` were copied into the tables, for good, and then were the tables'
    memory."""
    module = DenseTableBatchedEmbeddingBagsCodegen(SHAPES, use_cpu=True)
    before = [weights.clone() for weights in module.split_embedding_weights()]
    given = torch.ones_like(module.weights).requires_grad_()
    out = torch.func.functional_call(module, {"weights": given}, (IDS, OFFSETS))
    assert torch.equal(out[0, :8], torch.full((8,), 2.0))
    out.sum().backward()
    assert given.grad is not None and int(given.grad.sum()) == 8 * 5 + 4 * 2
    assert module.weights.grad is None and bool((given == 1).all())
    for weights, expected in zip(module.split_embedding_weights(), before, strict=True):
        assert torch.equal(weights, expected)
    with pytest.raises(ValueError, match="weights must have"):
        torch.func.functional_call(module, {"weights": torch.ones(3)}, (IDS, OFFSETS))


def test_tables_that_train_refuse_functional_call() -> None:
    """The given tensor was copied into the tables in silence, and its gradient was never there."""
    module = tables()
    before = module.weights_host.detach().clone()
    with pytest.raises(ValueError, match="weights_host is another tensor for the time of a call"):
        torch.func.functional_call(module, {"weights_host": torch.ones_like(before)}, (IDS, OFFSETS))
    assert torch.equal(module.weights_host, before)


@pytest.mark.parametrize("pooling_mode", PoolingMode)
def test_a_backward_reaches_every_parameter(pooling_mode: PoolingMode) -> None:
    """DistributedDataParallel around a model with these tables raised in its second step, as it waits for parameters
    that no backward reached; around FBGEMM's it does not."""
    specs = [(9, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 3
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=OptimType.EXACT_ADAGRAD, pooling_mode=pooling_mode, learning_rate=0.5
    )
    reached: list[str] = []
    nodes = []
    for name, param in module.named_parameters():
        node: Any = param.expand_as(param).grad_fn
        nodes.append(node.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, name=name: reached.append(name))
    for _ in range(2):
        (module(IDS, OFFSETS) + module(IDS, OFFSETS)).sum().backward()
    assert sorted(reached) == sorted([name for name, _ in module.named_parameters()] * 2)
    assert all(param.grad is None for param in module.parameters())
    assert all(bool((weights != 0).any()) for weights in module.split_embedding_weights())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "exact_sgd"}, "optimizer='exact_sgd' is not served"),
        ({"weights_precision": "fp32"}, "weights_precision='fp32' is not served"),
        ({"weights_precision": torch.float32}, "weights_precision=torch.float32 is not served"),
        ({"output_dtype": 0}, "output_dtype=0 is not served"),
    ],
)
def test_an_argument_that_is_no_enum_is_named(settings: dict[str, Any], message: str) -> None:
    """These were AttributeErrors of `name` and `as_int`, which say nothing of the argument."""
    with pytest.raises(ValueError, match=message):
        tables(**settings)


def test_inference_tables_take_modes_as_numbers_and_name_what_is_none() -> None:
    """Modes as numbers, which tables that train take, were AttributeErrors of `name`; so was a wrong type of output."""
    spec = ("a", 5, 8, SparseType.INT8, EmbeddingLocation.HOST)
    module = IntNBitTableBatchedEmbeddingBagsCodegen([spec], device="cpu", pooling_mode=1, bounds_check_mode=0)  # type: ignore[arg-type]
    assert module.pooling_mode is PoolingMode.MEAN and module.bounds_check_mode_int == BoundsCheckMode.FATAL
    for settings in ({"pooling_mode": 7}, {"bounds_check_mode": "FATAL"}, {"output_dtype": "fp16"}):
        with pytest.raises(ValueError, match=r"PoolingMode|BoundsCheckMode|output_dtype"):
            IntNBitTableBatchedEmbeddingBagsCodegen([spec], device="cpu", **settings)  # type: ignore[arg-type]


def test_negative_batch_sizes_are_named() -> None:
    """They were RuntimeErrors of a repeat, or said of offsets that they fall."""
    for sizes in ([[3, -1], [1, 1], [1, 1]], [[7, 1], [-1, -1], [0, 0]]):
        with pytest.raises(ValueError, match="batch_size_per_feature_per_rank must not be negative, got -1"):
            tables()(IDS, OFFSETS, batch_size_per_feature_per_rank=sizes)


@pytest.mark.parametrize(
    "settings",
    [{"ensemble_mode": EnsembleModeDefinition()}, {"global_weight_decay": GlobalWeightDecayDefinition()}],
)
def test_settings_of_other_optimizers_warn(settings: dict[str, Any]) -> None:
    """They were skipped in silence."""
    with pytest.warns(UserWarning, match=f"{next(iter(settings))} without effect"):
        tables(**settings)


def test_tables_are_made_under_another_default_device() -> None:
    """Under `torch.device("meta")` constructors raised NotImplementedError, as numbers were made there and moved."""
    with torch.device("meta"):
        module = tables()
        dense = DenseTableBatchedEmbeddingBagsCodegen(SHAPES, use_cpu=True)
    out: Tensor = module(IDS, OFFSETS)
    assert torch.equal(out, tables()(IDS, OFFSETS))
    assert dense(IDS, OFFSETS).device.type == "cpu"


def test_requests_of_no_ids_and_of_uniform_sizes() -> None:
    """`emulate_pruning` with L=0, and a uniform distribution below its least number, were RuntimeErrors of randint."""
    (request,) = generate_requests(1, B=4, T=2, L=0, E=10, emulate_pruning=True, use_cpu=True)
    assert request.indices.numel() == 0 and request.offsets.numel() == 9
    with pytest.raises(ValueError, match="sigma 2 is less than 3"):
        generate_requests(1, B=4, T=2, L=3, E=10, sigma_L=2, length_dist="uniform", use_cpu=True)


INT8 = ("a", 5, 8, SparseType.INT8, EmbeddingLocation.HOST)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda module: module(torch.tensor([[1, 2]]), torch.tensor([0, 2])), r"one dimension, got shape \[1, 2\]"),
        (
            lambda module: module.assign_embedding_weights([(BYTES[:1], BYTES[:, :4])]),
            r"bytes \[5, 8\], got .*\[1, 8\]",
        ),
        (lambda module: module.assign_embedding_weights([(BYTES.float(), BYTES[:, :4])]), "got torch.float32"),
        (lambda module: module.embedding_inplace_update([0], [[-1]], [BYTES]), "must not be negative, got -1"),
    ],
    ids=["two dimensions", "one row for all", "floats", "negative row"],
)
def test_inference_tables_refuse_what_they_would_misread(call: Callable[[Any], Any], message: str) -> None:
    """Ids [1, N] were read as one id and the rest left out, one row was written into all of a table, numbers were cut
    to bytes, and row -1 was the last."""
    module = IntNBitTableBatchedEmbeddingBagsCodegen([INT8], device="cpu")
    module.fill_random_weights()
    before = module.weights_host.clone()
    with pytest.raises(ValueError, match=message):
        call(module)
    assert torch.equal(module.weights_host, before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda weights: weights.float(),
            r"weights_host must be the \d+ bytes of the tables, uint8, got torch.float32",
        ),
        (lambda weights: weights[:-9], r"weights_host must be the \d+ bytes"),
    ],
)
def test_inference_tables_refuse_memory_that_holds_no_tables(given: Callable[[Tensor], Tensor], message: str) -> None:
    """Floats in the place of weights_host were looked up as zeros, and of too few bytes the last row was missing."""
    module = IntNBitTableBatchedEmbeddingBagsCodegen([INT8], device="cpu")
    module.fill_random_weights()
    module.weights_host = given(module.weights_host)
    with pytest.raises(ValueError, match=message):
        module(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))


@pytest.mark.parametrize("alignment", [0, -1])
def test_the_alignment_of_rows_is_positive(alignment: int) -> None:
    """0 was a ZeroDivisionError, and -1 was taken."""
    with pytest.raises(ValueError, match="row_alignment must be positive"):
        IntNBitTableBatchedEmbeddingBagsCodegen([INT8], device="cpu", row_alignment=alignment)
