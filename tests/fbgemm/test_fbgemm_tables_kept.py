"""FBGEMM's modules of tables as ours take arguments and bad batches, keep their state, move and are copied."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import LookupPolicy
from shardwise.embeddings import WeightDecayMode
from shardwise.embeddings.optim.fbgemm_types import (
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    MultiPassPrefetchConfig,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    get_available_compute_device,
    get_new_embedding_location,
    sparse_type_int_to_dtype,
    sparse_type_to_int,
)
from shardwise.fbgemm.tables import (
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    DenseTableBatchedEmbeddingBagsCodegen,
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    UserEnabledConfigDefinition,
)
from shardwise.kernels import BoundsCheckMode

HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)
SHAPES = [(9, 8), (5, 4), (7, 8)]
IDS, OFFSETS = torch.tensor([8, 1, 3, 0, 2, 2, 6]), torch.tensor([0, 1, 2, 4, 4, 5, 7])


def tables(**settings: Any) -> Any:
    settings = {"embedding_specs": [(*shape, *HOST) for shape in SHAPES], **settings}
    module = SplitTableBatchedEmbeddingBagsCodegen(**settings)
    torch.manual_seed(0)
    module.init_embedding_weights_uniform(-1, 1)
    return module


def train(module: Any, steps: int = 1) -> None:
    for _ in range(steps):
        module(IDS, OFFSETS).pow(2).sum().backward()


def held(module: Any) -> list[Tensor]:
    """Tables and states."""
    return [
        *module.split_embedding_weights(),
        *(state for states in module.split_optimizer_states() for state in states),
    ]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(held(a), held(b), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": 0.5}, r"max_norm=0.5 is not served"),
        ({"weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL}, r"weight_decay_mode=.*NONE, L2 and DECOUPLE are"),
        ({"counter_based_regularization": CounterBasedRegularizationDefinition()}, "counter_based_regularization="),
        ({"cowclip_regularization": CowClipDefinition()}, "cowclip_regularization="),
        ({"uvm_non_rowwise_momentum": True}, "uvm_non_rowwise_momentum=True"),
        ({"stats_reporter_config": object()}, "stats_reporter_config="),
        ({"optimizer_state_dtypes": {"momentum1": SparseType.FP16}}, "optimizer_state_dtypes=.*FP32"),
        (
            {"extra_optimizer_config": UserEnabledConfigDefinition(use_rowwise_bias_correction=True)},
            r"extra_optimizer_config=\['use_rowwise_bias_correction'\]",
        ),
        ({"tbe_input_multiplexer_config": object()}, "tbe_input_multiplexer_config="),
        ({"enable_raw_embedding_streaming": True}, "enable_raw_embedding_streaming=True"),
        ({"is_qr_tbe": True}, "is_qr_tbe=True"),
        ({"preallocated_host_buffers": {"weights": torch.zeros(2)}}, r"preallocated_host_buffers=\['weights'\]"),
        (
            {"optimizer": OptimType.EMAINPLACE_ROWWISE_ADAGRAD},
            "EMAINPLACE_ROWWISE_ADAGRAD is not served: SGD, EXACT_SGD",
        ),
        ({"optimizer": OptimType.NONE}, "tables of one dim, got \\[4, 8\\]"),
        ({"pooling_mode": PoolingMode.NONE}, "tables of one dim, got \\[4, 8\\]"),
        ({"weights_precision": SparseType.INT8}, "weights_precision=INT8"),
        ({"output_dtype": SparseType.INT8}, "output_dtype=INT8"),
        ({"embedding_specs": []}, "at least one table"),
        ({"embedding_specs": [(4, 0, *HOST)]}, "table 0: .* got 4 x 0"),
        ({"embedding_specs": [(-1, 4, *HOST)]}, "table 0: .* got -1 x 4"),
        (
            {"embedding_specs": [(4, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)]},
            r"EmbeddingLocation.DEVICE, got \['MANAGED_CACHING'\]",
        ),
        ({"embedding_specs": [(4, 4, EmbeddingLocation.DEVICE, ComputeDevice.CPU)]}, "EmbeddingLocation.HOST"),
        ({"embedding_specs": [(4, 4, EmbeddingLocation.MTIA, ComputeDevice.MTIA)]}, "or all for CUDA, got"),
        ({"feature_table_map": [0, 1, 3]}, r"names tables \[3\] of 3"),
        ({"feature_table_map": [0, 1, 1]}, r"tables \[2\] have no feature"),
        ({"table_names": ["a"]}, "table_names are 1 for 3 tables"),
        ({"learning_rate": -1.0}, "table-0, table-1, table-2.*lr must be finite and not negative"),
        ({"optimizer": OptimType.ADAM, "beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"bounds_check_mode": 9}, "9 is not a valid BoundsCheckMode"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tables(**settings)


@pytest.mark.filterwarnings("ignore:ensemble_mode")
def test_settings_of_caches_and_of_other_optimizers_change_nothing() -> None:
    module = tables(
        cache_algorithm=CacheAlgorithm.LFU, cache_load_factor=0.5, cache_sets=3, cache_reserved_memory=1.0,
        cache_precision=SparseType.FP16, enforce_hbm=True, record_cache_metrics=RecordCacheMetrics(True, True),
        gather_uvm_cache_stats=True, use_experimental_tbe=True, prefetch_pipeline=True,
        multipass_prefetch_config=MultiPassPrefetchConfig(), uvm_host_mapped=True,
        ensemble_mode=EnsembleModeDefinition(), emainplace_mode=EmainplaceModeDefinition(),
        global_weight_decay=GlobalWeightDecayDefinition(), extra_optimizer_config=UserEnabledConfigDefinition(),
        embedding_table_index_type=torch.int32, embedding_table_offset_type=torch.int32,
        embedding_shard_info=[(9, 8, 0, 0)] * 3, optimizer_state_dtypes={"momentum1": SparseType.FP32},
        learning_rate=torch.tensor(0.01),
    )  # fmt: skip
    other = tables()
    module.prefetch(IDS, OFFSETS)
    train(module)
    module.flush()
    module.reset_cache_states()
    train(other)
    # a rate in fp32 is another number
    torch.testing.assert_close(module.weights_host, other.weights_host)


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"optimizer": OptimType.EXACT_SGD}, True),
        ({"optimizer": OptimType.EXACT_ADAGRAD, "weight_decay_mode": WeightDecayMode.L2}, True),
        ({"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD}, True),
        ({"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode.DECOUPLE}, False),
        ({"optimizer": OptimType.ADAM}, False),
    ],
)
def test_a_weight_decay_without_effect_is_said(settings: dict[str, Any], warns: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        decayed = tables(weight_decay=0.1, **settings)
    assert [str(each.message).startswith("weight_decay=0.1 has no effect with") for each in said] == [True] * warns
    plain = tables(**settings)
    train(decayed)
    train(plain)
    assert equal(decayed, plain) is warns


@pytest.mark.parametrize("mode", BoundsCheckMode)
def test_a_bad_index_is_met_as_the_mode_says(mode: BoundsCheckMode) -> None:
    module, bad = tables(bounds_check_mode=mode, table_names=["a", "b", "c"]), IDS.clone()
    bad[2] = 5
    before = module.weights_host.detach().clone()
    if mode.effect is BoundsCheckMode.FATAL:
        with pytest.raises(IndexError, match=r"feature '1' \(table 'b'\), sample 0: id 5 is outside \[0, 5\)"):
            module(bad, OFFSETS)
        assert torch.equal(module.weights_host, before)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = module(bad, OFFSETS)
    assert len(said) == (mode.effect is BoundsCheckMode.WARNING)
    # it counts as no index, and no row is trained for it
    without = tables()(torch.cat([IDS[:2], IDS[3:]]), OFFSETS - (OFFSETS > 2).long())
    assert torch.equal(out, without)
    out.sum().backward()
    assert torch.equal(module.split_embedding_weights()[1][1:], before.view(-1)[: 5 * 4].view(5, 4)[1:])
    expected = BoundsCheckMode.NONE if mode is BoundsCheckMode.NONE else mode.effect
    assert module.bounds_check_mode_int == expected


def test_modes_have_one_of_three_effects() -> None:
    effects = {mode.name: mode.effect.name for mode in BoundsCheckMode}
    assert effects == {
        "FATAL": "FATAL", "WARNING": "WARNING", "IGNORE": "IGNORE", "NONE": "IGNORE", "V2_IGNORE": "IGNORE",
        "V2_WARNING": "WARNING", "V2_FATAL": "FATAL",
    }  # fmt: skip
    assert LookupPolicy(BoundsCheckMode.NONE).bounds_check is BoundsCheckMode.IGNORE
    assert [int(mode) for mode in BoundsCheckMode] == list(range(7))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(IDS, OFFSETS[:-1]), ValueError, "offsets"),
        (lambda m: m(IDS, OFFSETS.flip(0)), ValueError, "offset"),
        (lambda m: m(IDS, OFFSETS + 1), ValueError, "offset"),
        (lambda m: m(IDS.float(), OFFSETS), TypeError, "feature ids must be int32 or int64"),
        (lambda m: m(IDS.view(1, -1), OFFSETS), ValueError, "indices must have one dimension"),
        (lambda m: m(IDS, OFFSETS, torch.ones(3)), ValueError, "per_sample_weights are 3 for 7 indices"),
        (lambda m: m(IDS.to("meta"), OFFSETS), ValueError, "indices are on meta, the tables on cpu"),
        (
            lambda m: m(IDS, OFFSETS, torch.ones(7, requires_grad=True), torch.ones(2)),
            ValueError,
            "a number for each of 3 features, got 2",
        ),
        (
            lambda m: m(IDS, OFFSETS, batch_size_per_feature_per_rank=[[2], [2]]),
            ValueError,
            "a row for each of 3 features",
        ),
        (
            lambda m: m(IDS, OFFSETS, batch_size_per_feature_per_rank=[[2], [2], [1, 1]]),
            ValueError,
            "as many ranks in each",
        ),
        (
            lambda m: m(IDS, OFFSETS, batch_size_per_feature_per_rank=[[2], [2], [3]]),
            ValueError,
            "adds up to 7 bags, offsets are of 6",
        ),
        (lambda m: m(IDS, OFFSETS, vbe_output=torch.zeros(3)), ValueError, "vbe_output is not served"),
        (lambda m: m.update_hyper_parameters({"beta3": 1.0}), ValueError, r"\['beta3'\] are not served"),
        (lambda m: m.set_learning_rate(float("nan")), ValueError, "lr must be finite"),
        (lambda m: m.get_optimizer_buffer("momentum3_dev"), ValueError, "no buffer is called 'momentum3_dev'"),
    ],
)
def test_bad_calls_say_what_is_wrong_and_change_nothing(call: Any, error: type[Exception], message: str) -> None:
    module = tables(bounds_check_mode=BoundsCheckMode.FATAL)
    with pytest.raises(error, match=message):
        call(module)
    assert equal(module, tables())
    train(module)
    train(other := tables())
    assert equal(module, other)


def test_nothing_pooled_takes_one_batch_size() -> None:
    module = tables(embedding_specs=[(9, 8, *HOST)] * 3, pooling_mode=PoolingMode.NONE)
    with pytest.raises(ValueError, match="pooling_mode is NONE"):
        module(IDS, OFFSETS, batch_size_per_feature_per_rank=[[2]] * 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.split_optimizer_states(),
        lambda m: m.get_optimizer_state(),
        lambda m: m.get_optimizer_buffer("iter"),
        lambda m: m.set_learning_rate(0.1),
        lambda m: m.update_hyper_parameters({}),
        lambda m: m.set_optimizer_step(1),
        lambda m: m.reset_embedding_weight_momentum(IDS, OFFSETS, IDS, IDS),
    ],
)
def test_without_an_optimizer_there_is_nothing_to_set(call: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"OptimType.NONE has no optimizer"):
        call(tables(optimizer=OptimType.NONE, embedding_specs=[(9, 8, *HOST)]))


@pytest.mark.parametrize("optimizer", [OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD, OptimType.ADAM], ids=str)
@pytest.mark.parametrize("device", ["HOST", "DEVICE"])
def test_a_loaded_module_goes_on_with_the_same_bits(optimizer: OptimType, device: str) -> None:
    """From FBGEMM's layout, table after table, whatever order they lie in here, and of either place."""
    module, other = tables(optimizer=optimizer), tables(optimizer=optimizer)
    train(module, 3)
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    assert torch.equal(kept["weights_host"], torch.cat([table.flatten() for table in module.split_embedding_weights()]))
    assert kept["weights_offsets"].tolist() == [0, 72, 92]
    assert ("iter" in kept) == (optimizer is OptimType.ADAM)
    if device == "DEVICE":
        for name in [name for name in kept if name.endswith("_host")]:
            there = name.removesuffix("host") + "dev"
            kept[name], kept[there] = kept[there], kept[name]
    other.load_state_dict(kept)
    assert equal(module, other)
    train(module, 2)
    train(other, 2)
    assert equal(module, other) and other.weights_offsets.tolist() == module.weights_offsets.tolist()


def test_a_module_within_a_module_is_kept_by_its_prefix() -> None:
    model, other = (torch.nn.Sequential(tables(optimizer=OptimType.EXACT_ADAGRAD)) for _ in range(2))
    train(model[0])
    assert not other.load_state_dict(model.state_dict(prefix=""), strict=True).missing_keys
    assert equal(model[0], other[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.pop("weights_host"), "Missing key.*weights_host"),
        (lambda kept: kept.update(extra=torch.zeros(1)), "Unexpected key.*extra"),
        (lambda kept: kept.update(weights_host=torch.zeros(3)), "weights_host: 3 elements for 148"),
        (
            lambda kept: kept.update(rows_per_table=torch.tensor([9, 5, 8])),
            "rows_per_table: the checkpoint is of other",
        ),
    ],
)
def test_a_checkpoint_of_other_tables_is_refused(change: Any, message: str) -> None:
    kept = dict(tables().state_dict())
    change(kept)
    with pytest.raises(RuntimeError, match=message):
        tables().load_state_dict(kept)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_trains_for_itself(how: str) -> None:
    module = tables(optimizer=OptimType.ADAM, learning_rate=0.1)
    train(module)
    module.set_learning_rate(0.3)
    module.placeholder_autograd_tensor.requires_grad_(True)
    if how == "deepcopy":
        copied = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    before = [tensor.clone() for tensor in held(module)]
    train(copied)
    assert all(torch.equal(a, b) for a, b in zip(held(module), before, strict=True))
    train(module)
    assert equal(module, copied) and copied.get_learning_rate() == 0.3
    assert copied.weights_host.data_ptr() == copied._group.flat.data_ptr()


def test_moves_take_tables_and_states_along() -> None:
    module = tables(optimizer=OptimType.EXACT_ADAGRAD)
    train(module)
    weights, states = module.weights_host, module.get_optimizer_state()[0]["sum"].clone()
    module.to(torch.bfloat16)
    assert module.weights_host is weights and weights.dtype == torch.bfloat16
    assert all(table.dtype == torch.bfloat16 for table in module.split_embedding_weights())
    assert torch.equal(module.get_optimizer_state()[0]["sum"], states)
    train(module.float())
    with pytest.raises(ValueError, match=r"cannot become torch.float64"):
        module.double()
    made = tables(optimizer=OptimType.ADAM, device="meta").to_empty(device="cpu")
    assert made.D_offsets.tolist() == [0, 8, 12, 20] and made.feature_dims.tolist() == [8, 4, 8]
    assert made.current_device == torch.device("cpu") and made.iter.tolist() == [0]
    made.load_state_dict((other := tables(optimizer=OptimType.ADAM)).state_dict())
    train(made)
    train(other)
    assert equal(made, other)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_a_checkpoint_is_not_loaded_into_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"weights_host is on meta: call to_empty\(\)"):
        tables(device="meta").load_state_dict(tables().state_dict())


def test_replaced_memory_is_copied_back() -> None:
    module = tables()
    module.weights_host.data = torch.ones_like(module.weights_host)
    assert bool((module(IDS, OFFSETS)[0, :8] == 1).all())
    assert bool((module.split_embedding_weights()[2] == 1).all())
    module.weights_host.data = torch.ones(3)
    with pytest.raises(ValueError, match="weights_host must have"):
        module(IDS, OFFSETS)


def test_views_are_the_tables_and_the_states() -> None:
    module = tables(optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=1.0, eps=0.0)
    module.split_embedding_weights()[1].fill_(0.5)
    module.split_optimizer_states()[1][0].fill_(3)
    out = module(IDS, OFFSETS)
    assert bool((out[0, 8:12] == 1).all())
    out[:, 8:12].sum().backward()
    # a gradient of 1 in every element: the sum of squares is 3 + 1
    assert bool((module.split_embedding_weights()[1][3] == 0).all())
    assert module.get_optimizer_state()[1]["sum"].tolist() == [4, 3, 3, 4, 3]


def test_hyper_parameters_change_from_the_next_update_on() -> None:
    module, other = tables(optimizer=OptimType.ADAM), tables(
        optimizer=OptimType.ADAM, learning_rate=0.2, eps=0.1, beta1=0.5, beta2=0.6, weight_decay=0.3
    )  # fmt: skip
    module.update_hyper_parameters({"lr": 0.2, "eps": 0.1, "beta1": 0.5, "beta2": 0.6, "weight_decay": 0.3})
    assert module.get_learning_rate() == 0.2 and module.optimizer_args.beta1 == 0.5
    assert float(module.learning_rate_tensor) == pytest.approx(0.2)
    for each in (module, other):
        train(each, 2)
        each.set_optimizer_step(50)
        train(each)
    assert equal(module, other) and module.iter.tolist() == [51]
    # a module that moves keeps what was set
    moved = module.to_empty(device="meta").to_empty(device="cpu")
    assert moved.get_learning_rate() == 0.2 and torch.equal(moved._group.hyper, other._group.hyper)


@pytest.mark.parametrize("optimizer", [OptimType.EXACT_ROWWISE_ADAGRAD, OptimType.ADAM], ids=str)
def test_pruned_rows_begin_anew(optimizer: OptimType) -> None:
    module = tables(optimizer=optimizer, feature_table_map=[0, 1, 1, 2])
    for states in module.split_optimizer_states():
        states[0].fill_(2)
    before = [tensor.clone() for tensor in held(module)]
    lists, bounds = torch.tensor([1, 3, 0, 6]), torch.tensor([0, 2, 4])
    module.reset_embedding_weight_momentum(lists, bounds, torch.tensor([3, 0]), torch.tensor([1, 0]))
    if optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
        for t, rows in ((2, [0, 6]), (0, [1, 3])):
            before[t][rows], before[3 + t][rows] = 0, 0
    assert all(torch.equal(a, b) for a, b in zip(held(module), before, strict=True))


def test_buffers_are_found_by_name() -> None:
    module = tables(optimizer=OptimType.ADAM)
    assert module.get_optimizer_buffer("iter") is module.iter
    assert module.get_optimizer_buffer("momentum1_dev").numel() == 0


@pytest.mark.parametrize("pooling", PoolingMode)
def test_dense_tables_are_trained_by_any_optimizer(pooling: PoolingMode) -> None:
    shapes = [(9, 8), (5, 8), (7, 8)] if pooling is PoolingMode.NONE else SHAPES
    dense = DenseTableBatchedEmbeddingBagsCodegen(shapes, [0, 1, 2], pooling_mode=pooling, use_cpu=True)
    fused = tables(embedding_specs=[(*shape, *HOST) for shape in shapes], pooling_mode=pooling, learning_rate=0.5)
    for own, other in zip(dense.split_embedding_weights(), fused.split_embedding_weights(), strict=True):
        own.copy_(other)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.5)
    given = [torch.linspace(1, 2, 7).requires_grad_() for _ in range(2)]
    for _ in range(3):
        outs = [each(IDS, OFFSETS, weights) for each, weights in zip((dense, fused), given, strict=True)]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for own, other in zip(dense.split_embedding_weights(), fused.split_embedding_weights(), strict=True):
        torch.testing.assert_close(own, other)
    if pooling is not PoolingMode.NONE:
        torch.testing.assert_close(given[0].grad, given[1].grad)
        sizes = [[1, 1], [0, 3], [1, 0]]
        outs = [each(IDS, OFFSETS, batch_size_per_feature_per_rank=sizes) for each in (dense, fused)]
        torch.testing.assert_close(*outs)
    other = DenseTableBatchedEmbeddingBagsCodegen(shapes, use_cpu=True)
    other.load_state_dict(dense.state_dict())
    for own, same in zip(dense.split_embedding_weights(), other.split_embedding_weights(), strict=True):
        assert torch.equal(own, same)
    with pytest.raises(IndexError, match=r"feature '0' \(table 'table-0'\)"):
        dense(IDS + 3, OFFSETS)
    with pytest.raises(ValueError, match="use_mtia=True"):
        DenseTableBatchedEmbeddingBagsCodegen(shapes, use_mtia=True)


def test_the_gradient_of_dense_tables_moves_with_them() -> None:
    dense = DenseTableBatchedEmbeddingBagsCodegen(SHAPES, use_cpu=True)
    dense(IDS, OFFSETS).sum().backward()
    weights = dense.weights
    dense.half()
    assert dense.weights is weights and weights.grad is not None and weights.grad.dtype == torch.float16
    assert dense.split_embedding_weights()[0].dtype == torch.float16
    dense.weights.requires_grad_(False)
    assert not copy.deepcopy(dense).weights.requires_grad


def test_enums_are_read_from_words_and_numbers() -> None:
    assert PoolingMode.from_str("mean") is PoolingMode.MEAN
    assert EmbeddingLocation.from_str("managed_caching") is EmbeddingLocation.MANAGED_CACHING
    for read in (PoolingMode.from_str, EmbeddingLocation.from_str):
        with pytest.raises(ValueError, match="'other'"):
            read("other")
    places = [get_new_embedding_location(torch.device("cuda"), part).name for part in (0, 0.5, 1)]
    assert places == ["MANAGED", "MANAGED_CACHING", "DEVICE"]
    assert get_new_embedding_location(torch.device("cpu"), 0.5) is EmbeddingLocation.HOST
    for device, part in (("meta", 0.5), ("cpu", 2)):
        with pytest.raises(ValueError, match="must be"):
            get_new_embedding_location(torch.device(device), part)
    assert get_available_compute_device().name == ("CUDA" if torch.cuda.is_available() else "CPU")
    for each in SparseType:
        if each not in (SparseType.MX4, SparseType.NFP8):
            assert SparseType.from_int(sparse_type_to_int(each)) is each
    assert sparse_type_int_to_dtype(5) is torch.bfloat16
    with pytest.raises(ValueError, match="no type of a table's numbers is 7"):
        SparseType.from_int(7)
