"""FBGEMM's module of inference tables as ours: outputs are those of its rows' values, bytes and state as upstream's.

perf/evidence/fbgemm/inference_tables.py compares it with FBGEMM's own; nothing here needs that.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from shardwise.embeddings.optim.fbgemm_types import EmbeddingLocation, PoolingMode, SparseType
from shardwise.fbgemm import OPS, register_ops
from shardwise.fbgemm.tables import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
    align_to_cacheline,
    nbit_construct_split_state,
    rounded_row_size_in_bytes,
    unpadded_row_size_in_bytes,
)
from shardwise.kernels import dequantize_rows, quantize_rows
from shardwise.kernels.lookup.bounds import BoundsCheckMode

HOST = EmbeddingLocation.HOST
FORMATS = {
    SparseType.FP32: "fp32",
    SparseType.FP16: "fp16",
    SparseType.INT8: "int8",
    SparseType.INT4: "int4",
    SparseType.INT2: "int2",
}
TABLES = [
    ("a", 10, 8, SparseType.INT8, HOST),
    ("b", 5, 12, SparseType.FP16, HOST),
    ("c", 7, 16, SparseType.INT4, HOST),
    ("d", 4, 8, SparseType.INT2, HOST),
    ("e", 6, 4, SparseType.FP32, HOST),
]
TABLE_OF = [0, 2, 1, 3, 4, 2]
SAMPLES = 4


def filled(specs: list[Any] = TABLES, **arguments: Any) -> tuple[IntNBitTableBatchedEmbeddingBagsCodegen, list[Tensor]]:
    """Tables of quantized random rows, and the values of these."""
    planes = [quantize_rows(torch.randn(rows, dim), FORMATS[kind]) for _, rows, dim, kind, _ in specs]
    lists = [(payload, scales.view(torch.uint8) if scales.numel() else None) for payload, scales in planes]
    made = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, device="cpu", weight_lists=lists, **{"output_dtype": SparseType.FP32, **arguments}
    )
    values = [
        dequantize_rows(*both, dim, FORMATS[kind]) for both, (_, _, dim, kind, _) in zip(planes, specs, strict=True)
    ]
    return made, values


def batch(rows: list[int], dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 5, (len(rows) * SAMPLES,))
    counts = lengths.view(len(rows), SAMPLES).sum(1).tolist()
    ids = torch.cat([torch.randint(0, most, (count,)) for most, count in zip(rows, counts, strict=True)])
    return ids.to(dtype), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(dtype)


def pooled(values: list[Tensor], ids: Tensor, offsets: Tensor, mode: str, weights: Tensor | None = None) -> Tensor:
    """What `embedding_bag` makes of the values of each feature's table, side by side; -1 is a row of zeros."""
    columns = []
    for f, table in enumerate(values):
        ends = offsets[f * SAMPLES : (f + 1) * SAMPLES + 1].long()
        here = slice(int(ends[0]), int(ends[-1]))
        padded = torch.cat([table, torch.zeros(1, table.shape[1])])
        rows = ids[here].long()
        own = None if weights is None else weights[here]
        bags = embedding_bag(
            torch.where(rows < 0, len(table), rows), padded, ends - ends[0], per_sample_weights=own,
            mode="sum", include_last_offset=True,
        )  # fmt: skip
        columns.append(bags / ends.diff().clamp(min=1)[:, None] if mode == "mean" else bags)
    return torch.cat(columns, 1)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alignment", [None, 4, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pooled_outputs_are_those_of_the_values(
    mode: str, weighted: bool, alignment: int | None, dtype: torch.dtype
) -> None:
    tables, values = filled(feature_table_map=TABLE_OF, pooling_mode=PoolingMode[mode.upper()], row_alignment=alignment)
    ids, offsets = batch([TABLES[t][1] for t in TABLE_OF], dtype)
    weights = torch.randn(len(ids)) if weighted else None
    wanted = pooled([values[t] for t in TABLE_OF], ids, offsets, mode, weights)
    torch.testing.assert_close(tables(ids, offsets, weights), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("output", "dtype"),
    [(SparseType.FP32, torch.float32), (SparseType.FP16, torch.float16), (SparseType.BF16, torch.bfloat16)],
)
def test_sequences_are_the_values(kind: SparseType, output: SparseType, dtype: torch.dtype) -> None:
    specs = [("a", 9, 8, kind, HOST), ("b", 5, 8, SparseType.INT8, HOST)]
    tables, values = filled(specs, pooling_mode=PoolingMode.NONE, output_dtype=output)
    ids, offsets = batch([9, 5])
    first = int(offsets[SAMPLES])
    wanted = torch.cat([values[0][ids[:first]], values[1][ids[first:]]]).to(dtype)
    rows = tables(ids, offsets)
    assert rows.dtype == dtype and torch.equal(rows, wanted)


def test_bytes_as_outputs_have_their_scales_among_them() -> None:
    """Rows are copied, scale and bias in front; pooled rows are quantized, their scale and bias in fp32 behind."""
    specs = [("a", 9, 8, SparseType.INT8, HOST), ("b", 5, 8, SparseType.INT8, HOST)]
    tables, values = filled(specs, pooling_mode=PoolingMode.NONE, output_dtype=SparseType.INT8)
    rows = tables(torch.tensor([3, 8, 4]), torch.tensor([0, 2, 3]))
    whole = [each for each, _ in tables.split_embedding_weights(split_scale_shifts=False)]
    assert torch.equal(rows, torch.stack([whole[0][3], whole[0][8], whole[1][4]]))
    tables, values = filled(specs, output_dtype=SparseType.INT8)
    ids, offsets = batch([9, 5])
    numbers = tables(ids, offsets).view(SAMPLES, 2, 16)
    scales = numbers[..., 8:].contiguous().view(torch.float32)
    back = numbers[..., :8] * scales[..., :1] + scales[..., 1:]
    wanted = pooled(values, ids, offsets, "sum").view(SAMPLES, 2, 8)
    assert bool(((back - wanted).abs() <= 0.51 * scales[..., :1] + 1e-6).all())


@pytest.mark.parametrize("array", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_pruned_rows_count_as_none(array: bool, mode: str) -> None:
    remapping = torch.tensor([4, -1, 0, 1, -1, -1, 2, 3, -1], dtype=torch.int32)
    remappings = [None, remapping, None, None, None]
    tables, values = filled(
        feature_table_map=TABLE_OF, index_remapping=remappings, use_array_for_index_remapping=array,
        pooling_mode=PoolingMode[mode.upper()],
    )  # fmt: skip
    ids, offsets = batch([9 if t == 1 else TABLES[t][1] for t in TABLE_OF])
    begin, end = int(offsets[2 * SAMPLES]), int(offsets[3 * SAMPLES])
    rows = ids.clone()
    rows[begin:end] = remapping[ids[begin:end]].long()
    torch.testing.assert_close(tables(ids, offsets), pooled([values[t] for t in TABLE_OF], rows, offsets, mode))
    assert tables.original_rows_per_table.tolist() == [10, 7, 9, 4, 6, 7]
    assert tables.index_remappings_array.numel() == (9 if array else 0)


def test_bytes_and_state_are_upstreams() -> None:
    """Numbers as FBGEMM 1.8.0 has them for these tables."""
    tables, _ = filled(feature_table_map=TABLE_OF)
    assert (tables.host_size, tables.weights_offsets.tolist()) == (640, [0, 256, 128, 384, 512, 256])
    assert tables.weights_placements.tolist() == [3] * 6 and tables.weights_tys.tolist() == [2, 3, 1, 4, 0, 3]
    state = {name: (list(each.shape), each.dtype) for name, each in tables.state_dict().items()}
    assert list(state.items()) == [
        ("D_offsets", ([7], torch.int32)),
        ("rows_per_table", ([6], torch.int64)),
        ("bounds_check_warning", ([1], torch.int64)),
        ("weights_tys", ([6], torch.uint8)),
        ("index_remappings_array_offsets", ([0], torch.int64)),
        ("index_remappings_array", ([0], torch.int32)),
        ("index_remapping_hash_table_offsets", ([0], torch.int64)),
        ("index_remapping_hash_table", ([0], torch.int32)),
        ("original_rows_per_table", ([0], torch.int64)),
        ("table_wise_cache_miss", ([0], torch.int64)),
        ("lxu_cache_weights", ([0, 0], torch.uint8)),
    ]
    other, _ = filled(feature_table_map=TABLE_OF)
    other.load_state_dict(tables.state_dict())


def test_views_of_rows_share_the_buffer() -> None:
    tables, _ = filled(row_alignment=16)
    for (numbers, scales, bias), (both, shifts), (whole, _), (_, rows, dim, kind, _) in zip(
        tables.split_embedding_weights_with_scale_bias(2), tables.split_embedding_weights(),
        tables.split_embedding_weights(False), TABLES, strict=True,
    ):  # fmt: skip
        assert list(whole.shape) == [rows, rounded_row_size_in_bytes(dim, kind, 16)]
        assert numbers.data_ptr() == both.data_ptr() and torch.equal(numbers, both)
        assert whole.untyped_storage().data_ptr() == tables.weights_host.data_ptr()
        if kind.name.startswith("INT"):
            assert scales is not None and bias is not None and shifts is not None
            assert torch.equal(torch.cat([scales, bias], 1).view(torch.uint8), shifts)
        else:
            assert scales is None and bias is None and shifts is None
        assert int(whole[:, unpadded_row_size_in_bytes(dim, kind) :].count_nonzero()) == 0


def test_rows_are_filled_copied_and_written() -> None:
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(TABLES, device="cpu", output_dtype=SparseType.FP32)
    offsets = torch.arange(6)
    with pytest.raises(RuntimeError, match="initialize_weights"):
        tables(torch.zeros(5, dtype=torch.int64), offsets)
    tables.fill_random_weights()
    assert tables.weights_host.count_nonzero() > 100
    rows = torch.full((2, 12), 7, dtype=torch.uint8)
    tables.embedding_inplace_update([0], [[1, 9]], [rows])
    assert torch.equal(tables.split_embedding_weights(False)[0][0][[1, 9]], rows)
    twin = copy.deepcopy(tables)
    twin.assign_embedding_weights(tables.split_embedding_weights())
    assert torch.equal(twin.weights_host, tables.weights_host)
    with pytest.raises(ValueError, match="there are 5 tables, got the weights of 1"):
        tables.assign_embedding_weights(tables.split_embedding_weights()[:1])
    with pytest.raises(ValueError, match="table 0 of INT8 has uint8"):
        tables.assign_embedding_weights(tables.split_embedding_weights(False))


def test_sizes_are_upstreams() -> None:
    assert [unpadded_row_size_in_bytes(16, kind) for kind in FORMATS] == [64, 32, 20, 12, 8]
    assert [rounded_row_size_in_bytes(16, kind, 16) for kind in FORMATS] == [64, 32, 32, 16, 16]
    assert [align_to_cacheline(size) for size in (0, 1, 128, 129)] == [0, 128, 128, 256]
    specs: list[Any] = [(*TABLES[0][:4], place) for place in EmbeddingLocation]
    state = nbit_construct_split_state(specs, cacheable=False, row_alignment=16)
    assert state == (512, 256, 512, [0, 1, 1, 3, 4], [0, 0, 256, 0, 256])


@pytest.mark.parametrize("mode", ["WARNING", "IGNORE"])
def test_ids_out_of_range_are_looked_up_as_0(mode: str) -> None:
    """Upstream's modes; what was given stays as it was, where upstream writes into it."""
    tables, _ = filled(bounds_check_mode=BoundsCheckMode[mode])
    ids, offsets = torch.tensor([1, 99, -5, 2, -1]), torch.tensor([0, 2, 3, 3, 4, 9])
    given = (ids.clone(), offsets.clone())
    right = tables(torch.tensor([1, 0, 0, 2, -1]), torch.tensor([0, 2, 3, 3, 4, 5]))
    if mode == "WARNING":
        with pytest.warns(UserWarning, match="3 ids or offsets are out of range, the first is 99"):
            output = tables(ids, offsets)
        assert tables.bounds_check_warning.tolist() == [3]
    else:
        output = tables(ids, offsets)
    assert torch.equal(output, right)
    assert torch.equal(ids, given[0]) and torch.equal(offsets, given[1])


def test_fatal_names_the_id_and_the_offset() -> None:
    tables, _ = filled(bounds_check_mode=BoundsCheckMode.FATAL)
    offsets = torch.arange(6)
    with pytest.raises(IndexError, match=r"feature 1: id 5 at position 1 is outside \[0, 5\)"):
        tables(torch.tensor([0, 5, 0, 0, 0]), offsets)
    with pytest.raises(ValueError, match=r"offsets\[3\] is 2"):
        tables(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 1, 3, 2, 4, 5]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"embedding_specs": [(*TABLES[0][:4], EmbeddingLocation.MANAGED_CACHING)]}, "MANAGED_CACHING"),
        ({"embedding_specs": [(*TABLES[0][:4], EmbeddingLocation.DEVICE)]}, "tables of a CPU lie at HOST"),
        ({"embedding_specs": [("a", 3, 5, SparseType.INT4, HOST)]}, "must be positive and fill whole bytes of 4-bit"),
        ({"embedding_specs": [("a", 3, 4, SparseType.BF16, HOST)]}, "not BF16"),
        ({"embedding_specs": []}, "feature_table_map must name each"),
        ({"feature_table_map": [0, 1, 2, 3]}, "feature_table_map must name each of the 5 tables"),
        ({"pooling_mode": PoolingMode.NONE}, "tables of several dims"),
        ({"output_dtype": SparseType.INT4}, "output_dtype must be one of"),
        ({"scale_bias_size_in_bytes": 8}, "scale_bias_size_in_bytes=8"),
        ({"reverse_qparam": True}, "reverse_qparam=True"),
        ({"index_remapping": [torch.tensor([0])]}, "there are 5 tables, got 1 remappings"),
    ],
)
def test_settings_that_are_not_served_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        IntNBitTableBatchedEmbeddingBagsCodegen(**{"embedding_specs": TABLES, "device": "cpu", **arguments})


def test_inputs_that_do_not_fit_are_named() -> None:
    tables, _ = filled()
    with pytest.raises(ValueError, match="expected F\\*B \\+ 1"):
        tables(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="2 per-id weights for 5 ids"):
        tables(torch.zeros(5, dtype=torch.int64), torch.arange(6), torch.ones(2))
    with pytest.raises(TypeError, match="indices must be int32 or int64"):
        tables(torch.zeros(5), torch.arange(6))


def test_tables_are_moved_from_meta() -> None:
    """A module made on meta is given a device, then buffers and weights there."""
    made = IntNBitTableBatchedEmbeddingBagsCodegen(TABLES, device="meta", output_dtype=SparseType.FP32)
    made.reset_weights_placements_and_offsets(torch.device("cpu"), HOST.value)
    made.recompute_module_buffers()
    made.initialize_weights()
    whole, _ = filled()
    made.assign_embedding_weights(whole.split_embedding_weights())
    ids, offsets = batch([spec[1] for spec in TABLES])
    assert torch.equal(made(ids, offsets), whole(ids, offsets))


@pytest.mark.parametrize("mode", [PoolingMode.SUM, PoolingMode.NONE])
def test_the_op_looks_up_in_two_buffers(mode: PoolingMode) -> None:
    """Tables placed at MANAGED lie in uvm_weights: the second one here, whose bytes in the other buffer are wiped."""
    specs = [(*TABLES[0][:2], 8, kind, HOST) for kind in FORMATS]
    tables, _ = filled(specs, pooling_mode=mode)
    ids, offsets = batch([10] * len(specs))
    dev, begin = tables.weights_host.clone(), tables.weights_physical_offsets[1]
    dev[begin : tables.weights_physical_offsets[2]] = 0
    placements = torch.tensor([3, 1, 3, 3, 3], dtype=torch.int32)
    output = OPS["int_nbit_split_embedding_codegen_lookup_function"].function(
        dev, tables.weights_host, placements, tables.weights_offsets, tables.weights_tys, tables.D_offsets,
        tables.total_D, 8, 8, 8, 8, 8, ids, offsets, int(mode), None, 0,
    )  # fmt: skip
    assert torch.equal(output, tables(ids, offsets))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({4: torch.tensor([2, 5], dtype=torch.uint8)}, r"weights_tys\[1\] is 5"),
        ({2: torch.tensor([3, 0], dtype=torch.int32)}, r"weights_placements\[1\] is 0: tables of a CPU"),
        ({3: torch.tensor([0, 9999])}, r"weights_offsets\[1\] is 9999, its buffer has"),
        ({3: torch.tensor([0])}, "must have F, F, F and F \\+ 1 elements, got 2, 1, 2 and 3"),
        ({5: torch.tensor([0, 8, 8], dtype=torch.int32)}, "D_offsets must increase, got 8 and then 8"),
        ({6: 17}, "total_D must be 16, as D_offsets say, got 17"),
        ({14: 3}, "pooling_mode must be 0"),
        ({16: 3}, "output_dtype 3: outputs are 0 "),
        ({4: torch.tensor([2, 6], dtype=torch.uint8)}, "fp8_exponent_bits and fp8_exponent_bias must be positive"),
        # a bias of 0 was read as none at all
        ({4: torch.tensor([2, 6], dtype=torch.uint8), 21: 4, 22: 0}, r"fp8_exponent_bias must be .*, got \(4, 0\)"),
        # floats and rows in a matrix were tables of fewer rows
        ({0: torch.ones(500)}, r"dev_weights must be flat bytes, uint8 \[N\], got torch.float32 \[500\]"),
        ({0: torch.zeros(1, 500, dtype=torch.uint8)}, r"dev_weights must be flat bytes, .*got torch.uint8 \[1, 500\]"),
        ({3: torch.tensor([[0, 256]])}, r"weights_offsets must have one dimension, got shape \[1, 2\]"),
    ],
)
def test_bad_arguments_of_the_op_are_named(changed: dict[int, Any], text: str) -> None:
    tables, _ = filled([("a", 10, 8, SparseType.INT8, HOST), ("b", 5, 8, SparseType.INT8, HOST)])
    args: list[Any] = [
        tables.weights_host, tables.weights_uvm, tables.weights_placements, tables.weights_offsets, tables.weights_tys,
        tables.D_offsets, 16, 0, 0, 8, 0, 0, torch.tensor([1, 2]), torch.tensor([0, 1, 2]), 0, None, 0,
        None, None, 1, 0, -1, -1,
    ]  # fmt: skip
    for place, value in changed.items():
        args[place] = value
    with pytest.raises((TypeError, ValueError), match=text):
        OPS["int_nbit_split_embedding_codegen_lookup_function"].function(*args)


@pytest.mark.parametrize("registered", [False, True])
def test_compiled_tables_give_the_same_bits(registered: bool) -> None:
    """One graph where FBGEMM's op is registered; elsewhere a graph up to the lookup."""
    if registered:
        register_ops()
    remappings = [None, torch.tensor([4, -1, 0, 1, -1, 2, 3]), None, None, None]
    tables, _ = filled(index_remapping=remappings, bounds_check_mode=BoundsCheckMode.IGNORE)
    ids, offsets = batch([spec[1] for spec in TABLES])
    compiled = torch.compile(tables, backend="eager", fullgraph=registered)
    assert torch.equal(compiled(ids, offsets), tables(ids, offsets))
