"""FBGEMM's module of quantized tables for inference, with upstream's constructor, methods, buffers and bytes.

Shapes: T tables, F features of which several may share a table; indices [N], offsets [F*B + 1], per_sample_weights [N];
the output is [B, sum of dims], or [N, D] where nothing is pooled. Tables lie in one flat buffer of bytes: weights_host
on a CPU, weights_dev on a GPU; a row is its scale and bias in fp16 if its numbers are integers, then the numbers,
filled up to a multiple of `row_alignment`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.fbgemm_types import CacheAlgorithm, EmbeddingLocation, PoolingMode, SparseType
from shardwise.kernels import BoundsCheckMode
from shardwise.kernels.features import same_length

from ..nbit_lookup import OUTPUTS, int_nbit_split_embedding_codegen_lookup_function
from . import inference_ids
from .inference_layout import (
    DEFAULT_SCALE_BIAS_SIZE_IN_BYTES,
    TYPES,
    Spec,
    nbit_construct_split_state,
    require_locations,
    rounded_row_size_in_bytes,
    type_name,
    unpadded_row_size_in_bytes,
)

__all__ = ["IntNBitTableBatchedEmbeddingBagsCodegen"]

_OP = "int_nbit_split_embedding_codegen_lookup_function"
# what a compiler calls where the op is not registered
_outside_graphs: Any = torch.compiler.disable(int_nbit_split_embedding_codegen_lookup_function)  # type: ignore[no-untyped-call]
# SparseType -> its number as the type of outputs
_OUTPUT_NUMBERS = {"FP32": 0, "FP16": 1, "INT8": 2, "BF16": 5}
# bits of the exponent of fp8, and its bias, where none are given
_FP8 = (4, 7)


class IntNBitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Quantized tables of several types and dims, looked up at once; not trained.

    Args:
        embedding_specs: (feature names, rows, dim, SparseType, EmbeddingLocation) of each table: HOST on a CPU, DEVICE
            on a GPU. Caches over host memory are not served.
        feature_table_map: the table of each feature; by default feature t looks up table t.
        index_remapping: of each table the row of every id, [ids], -1 for ids that were pruned; None of one that is not.
        pooling_mode: how a bag becomes a row; with NONE every id has its own.
        device: of buffers and outputs; by default the current GPU.
        bounds_check_mode: what becomes of ids outside their table: FATAL raises (on CUDA the device asserts), WARNING
            and IGNORE look row 0 up, NONE leaves them to the lookup, which raises on a CPU and counts them as none on
            CUDA.
        weight_lists: rows [R, bytes] and scales of each table, as `assign_embedding_weights` takes them.
        pruning_hash_load_factor: without effect, see `use_array_for_index_remapping`.
        use_array_for_index_remapping: False leaves remappings out of the state dict.
        output_dtype: FP32, FP16, BF16, or INT8: bytes with scales among them.
        row_alignment: bytes of which a row has a multiple: by default 1 on a CPU and 16 on a GPU.
        fp8_exponent_bits: of fp8 tables, by default 4.
        fp8_exponent_bias: of fp8 tables, by default 7.
        cacheline_alignment: whether tables begin on multiples of 128 bytes.
        feature_names_per_table: for `get_feature_num_per_table`.
        indices_dtype: of the remapping that is kept.

    `cache_algorithm` to `record_cache_metrics`, `gather_uvm_cache_stats`, `cache_assoc` and `uvm_host_mapped` are about
    caches, and have no effect without one.

    Raises:
        ValueError: a setting that is not served, or settings that do not fit one another; names it.
    """

    weights_offsets: Tensor
    weights_placements: Tensor
    weights_tys: Tensor
    D_offsets: Tensor
    rows_per_table: Tensor
    bounds_check_warning: Tensor
    index_remappings_array: Tensor
    index_remappings_array_offsets: Tensor
    original_rows_per_table: Tensor
    table_wise_cache_miss: Tensor
    lxu_cache_weights: Tensor
    weights_dev: Tensor
    weights_host: Tensor
    weights_uvm: Tensor
    max_int2_D: int
    max_int4_D: int
    max_int8_D: int
    max_float8_D: int
    max_float16_D: int
    max_float32_D: int

    def __init__(
        self,
        embedding_specs: list[Spec],
        feature_table_map: list[int] | None = None,
        index_remapping: list[Tensor] | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        weight_lists: list[tuple[Tensor, Tensor | None]] | None = None,
        pruning_hash_load_factor: float = 0.5,
        use_array_for_index_remapping: bool = True,
        output_dtype: SparseType = SparseType.FP16,
        cache_algorithm: CacheAlgorithm = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        enforce_hbm: bool = False,
        record_cache_metrics: Any = None,
        gather_uvm_cache_stats: bool | None = False,
        row_alignment: int | None = None,
        fp8_exponent_bits: int | None = None,
        fp8_exponent_bias: int | None = None,
        cache_assoc: int = 32,
        scale_bias_size_in_bytes: int = DEFAULT_SCALE_BIAS_SIZE_IN_BYTES,
        cacheline_alignment: bool = True,
        uvm_host_mapped: bool = False,
        reverse_qparam: bool = False,
        feature_names_per_table: list[list[str]] | None = None,
        indices_dtype: torch.dtype = torch.int32,
    ) -> None:
        super().__init__()
        self.uuid = str(uuid.uuid4())
        self.current_device = (
            torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        )
        if scale_bias_size_in_bytes != DEFAULT_SCALE_BIAS_SIZE_IN_BYTES or reverse_qparam:
            raise ValueError(
                f"scale_bias_size_in_bytes={scale_bias_size_in_bytes}, reverse_qparam={reverse_qparam}: rows begin with"
                " a scale and a bias of 4 bytes; others are those of MTIA, which is not served"
            )
        self.scale_bias_size_in_bytes, self.reverse_qparam = scale_bias_size_in_bytes, reverse_qparam
        self.embedding_specs = [tuple_of(spec) for spec in embedding_specs]
        locations = [spec[4].name for spec in self.embedding_specs]
        self.use_cpu = self.current_device.type == "cpu"
        if self.current_device.type == "meta":
            self.use_cpu = all(location == "HOST" for location in locations)
        require_locations(locations, self.use_cpu, enforce_hbm)
        self.enforce_hbm, self.uvm_host_mapped = enforce_hbm, uvm_host_mapped
        self.pooling_mode = PoolingMode(pooling_mode)
        self.bounds_check_mode_int = inference_ids.MODES[BoundsCheckMode(bounds_check_mode).name]
        self.output_dtype = _output_number(output_dtype)
        self.feature_names_per_table, self.indices_dtype = feature_names_per_table, indices_dtype
        self.feature_names = [spec[0] for spec in self.embedding_specs]
        self.cache_algorithm, self.cache_assoc = cache_algorithm, cache_assoc
        self.cache_load_factor, self.cache_sets = cache_load_factor, cache_sets
        self.cache_reserved_memory, self.gather_uvm_cache_stats = cache_reserved_memory, gather_uvm_cache_stats
        self.record_cache_metrics = record_cache_metrics
        self.row_alignment = row_alignment if row_alignment is not None else 1 if self.use_cpu else 16
        if self.row_alignment <= 0:
            raise ValueError(f"row_alignment must be positive, got {row_alignment}")
        self.feature_table_map = _table_of_features(feature_table_map, self.embedding_specs, self.pooling_mode)
        dims = [self.embedding_specs[t][2] for t in self.feature_table_map]
        self.total_D = sum(dims)
        for name in TYPES:
            most = max((spec[2] for spec in self.embedding_specs if type_name(spec[3]) == name), default=0)
            setattr(self, f"max_{name.lower().replace('fp', 'float')}_D", most)
        is_fp8 = any(type_name(spec[3]) == "FP8" for spec in self.embedding_specs)
        given = (fp8_exponent_bits, fp8_exponent_bias)
        self.fp8_exponent_bits, self.fp8_exponent_bias = (
            (default if number is None else number) if is_fp8 else -1
            for number, default in zip(given, _FP8, strict=True)
        )
        self._register_tables()
        self._register_pruning(bool(getattr(record_cache_metrics, "record_tablewise_cache_miss", False)))
        self.weight_initialized = False
        for place in ("dev", "host", "uvm"):
            setattr(self, f"weights_{place}", torch.zeros(0, device=self.current_device, dtype=torch.uint8))
        self.initialize_physical_weights_placements_and_offsets(cacheline_alignment)
        if weight_lists:
            self.initialize_weights()
            self.assign_embedding_weights(weight_lists)
        if index_remapping:
            self.set_index_remappings(index_remapping, pruning_hash_load_factor, use_array_for_index_remapping)
        # a compiler takes the op where there is one
        self._has_op = bool(torch._C._jit_get_schemas_for_operator(f"fbgemm::{_OP}"))

    def _register_tables(self) -> None:
        specs = [self.embedding_specs[t] for t in self.feature_table_map]
        for name, numbers, dtype in (
            ("D_offsets", accumulate((spec[2] for spec in specs), initial=0), torch.int32),
            ("rows_per_table", (spec[1] for spec in specs), torch.int64),
            ("bounds_check_warning", (0,), torch.int64),
            ("weights_tys", (TYPES[type_name(spec[3])][0] for spec in specs), torch.uint8),
        ):
            self.register_buffer(name, torch.tensor(list(numbers), device=self.current_device, dtype=dtype))

    def _register_pruning(self, counts_misses: bool) -> None:
        self.index_remapping_hash_table_cpu: tuple[Tensor, Tensor] | None = None
        misses = len(self.feature_table_map) if counts_misses else 0
        for name, size, dtype in (
            ("index_remappings_array_offsets", (0,), torch.int64),
            ("index_remappings_array", (0,), self.indices_dtype),
            ("index_remapping_hash_table_offsets", (0,), torch.int64),
            ("index_remapping_hash_table", (0,), self.indices_dtype),
            ("original_rows_per_table", (0,), torch.int64),
            ("table_wise_cache_miss", (misses,), torch.int64),
            ("lxu_cache_weights", (0, 0), torch.uint8),
        ):
            self.register_buffer(name, torch.zeros(size, device=self.current_device, dtype=dtype))

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look ids up: [B, total_D], or [N, D] where nothing is pooled, in `output_dtype`.

        Raises:
            RuntimeError: `initialize_weights` was not called.
            IndexError, ValueError: bad ids or offsets, as `bounds_check_mode` says.
            ValueError: weights_host, weights_dev or weights_uvm was replaced by what holds no tables.
        """
        if not self.weight_initialized:
            raise RuntimeError("call initialize_weights() before the first lookup: there are no weights")
        for name, tensor in (("indices", indices), ("offsets", offsets)):
            if tensor.dim() != 1:
                raise ValueError(f"{name} must have one dimension, got shape {list(tensor.shape)}")
        device = self.bounds_check_warning.device
        if device.type not in ("cpu", "meta"):
            indices, offsets = indices.to(device, non_blocking=True), offsets.to(device, non_blocking=True)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.to(device, non_blocking=True)
        same_length(per_sample_weights, indices)
        if self.index_remapping_hash_table_cpu is not None or self.index_remappings_array.numel():
            indices, offsets = self._checked(self.original_rows_per_table, indices, offsets)
            indices = self._remapped(indices, offsets)
        indices, offsets = self._checked(self.rows_per_table, indices, offsets)
        lookup: Any = int_nbit_split_embedding_codegen_lookup_function
        if torch.compiler.is_compiling():
            lookup = getattr(torch.ops.fbgemm, _OP) if self._has_op else _outside_graphs
        output: Tensor = lookup(
            dev_weights=self._bytes_of("host") if self.host_size > 0 else self._bytes_of("dev"),
            uvm_weights=self._bytes_of("uvm"),
            weights_placements=self.weights_placements,
            weights_offsets=self.weights_offsets,
            weights_tys=self.weights_tys,
            D_offsets=self.D_offsets,
            total_D=self.total_D,
            max_int2_D=self.max_int2_D,
            max_int4_D=self.max_int4_D,
            max_int8_D=self.max_int8_D,
            max_float16_D=self.max_float16_D,
            max_float32_D=self.max_float32_D,
            indices=indices,
            offsets=offsets,
            pooling_mode=int(self.pooling_mode),
            indice_weights=per_sample_weights,
            output_dtype=self.output_dtype,
            row_alignment=self.row_alignment,
            max_float8_D=self.max_float8_D,
            fp8_exponent_bits=self.fp8_exponent_bits,
            fp8_exponent_bias=self.fp8_exponent_bias,
        )
        return output

    def _bytes_of(self, place: str) -> Tensor:
        """The buffer of tables there, which a program may have replaced."""
        name, size = f"weights_{place}", getattr(self, f"{place}_size")
        buffer: Tensor = getattr(self, name)
        if buffer.dtype != torch.uint8 or buffer.numel() < size:
            raise ValueError(
                f"{name} must be the {size} bytes of the tables, uint8, got {buffer.dtype} {list(buffer.shape)}"
            )
        return buffer

    def _checked(self, rows: Tensor, indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        mode = next(name for name, number in inference_ids.MODES.items() if number == self.bounds_check_mode_int)
        if mode == inference_ids.NONE:
            return indices, offsets
        features = inference_ids.features_of(rows)
        return inference_ids.check_ids(features, indices, offsets, mode.removeprefix("V2_"), self.bounds_check_warning)

    def _remapped(self, indices: Tensor, offsets: Tensor) -> Tensor:
        array, begins = self.index_remappings_array, self.index_remappings_array_offsets
        if self.index_remapping_hash_table_cpu is not None:
            array, begins = self.index_remapping_hash_table_cpu
        return inference_ids.remap_ids(indices, offsets, array, begins, self._table_of)

    def prefetch(self, indices: Tensor, offsets: Tensor) -> None:
        """Nothing, as there is no cache; indices [N], offsets [T*B + 1]."""

    def reset_cache_states(self) -> None:
        """Nothing, as there is no cache."""

    def get_feature_num_per_table(self) -> list[int]:
        """How many features look each table up; empty without `feature_names_per_table`."""
        return [len(names) for names in self.feature_names_per_table or []]

    def initialize_physical_weights_placements_and_offsets(self, cacheline_alignment: bool = True) -> None:
        """Set where each table begins, and the bytes of each buffer."""
        state = nbit_construct_split_state(
            self.embedding_specs, True, self.row_alignment, self.scale_bias_size_in_bytes, cacheline_alignment
        )
        self.weights_physical_placements = [int(place) for place in state.placements]
        self.weights_physical_offsets = state.offsets
        self.host_size, self.dev_size, self.uvm_size = state.host_size, state.dev_size, state.uvm_size

    def initialize_logical_weights_placements_and_offsets(self) -> None:
        """Make the tensors that say of each feature where its table is."""
        placements, offsets = (
            [numbers[t] for t in self.feature_table_map]
            for numbers in (self.weights_physical_placements, self.weights_physical_offsets)
        )
        self.weights_offsets = torch.tensor(offsets, device=self.current_device, dtype=torch.int64)
        self.weights_placements = torch.tensor(placements, device=self.current_device, dtype=torch.int32)

    def initialize_weights(self) -> None:
        """Make the buffers, of zeros; a second call does nothing."""
        if self.weight_initialized:
            return
        self.weight_initialized = True
        self.initialize_logical_weights_placements_and_offsets()
        for place, size in (("dev", self.dev_size), ("host", self.host_size), ("uvm", self.uvm_size)):
            if size:
                zeros = torch.zeros(size, device=self.current_device, dtype=torch.uint8)
                setattr(self, f"weights_{place}", zeros)

    def split_embedding_weights_with_scale_bias(
        self, split_scale_bias_mode: int = 1
    ) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Views of each table's rows, uint8 [rows, bytes].

        Args:
            split_scale_bias_mode: 0 for whole rows with what fills them up; 1 for numbers, and the 4 bytes of scale and
                bias; 2 for numbers, scales fp16 [rows, 1] and biases fp16 [rows, 1]. Where a row has no scales, None.

        Raises:
            RuntimeError: there are no weights yet.
            ValueError: an unknown mode.
        """
        if not self.weight_initialized:
            raise RuntimeError("call initialize_weights() first: there are no weights")
        if split_scale_bias_mode not in (0, 1, 2):
            raise ValueError(f"split_scale_bias_mode must be 0, 1 or 2, got {split_scale_bias_mode}")
        splits: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        for t, (_, _, dim, weight_ty, _) in enumerate(self.embedding_specs):
            rows, scales = self._rows_of(t), self.scale_bias_size_in_bytes
            if split_scale_bias_mode:
                rows = rows[:, : unpadded_row_size_in_bytes(dim, weight_ty, scales)]
            if split_scale_bias_mode == 0 or not type_name(weight_ty).startswith("INT"):
                splits.append((rows, None, None))
            elif split_scale_bias_mode == 1:
                splits.append((rows[:, scales:], rows[:, :scales], None))
            else:
                scale, bias = rows[:, : scales // 2], rows[:, scales // 2 : scales]
                splits.append((rows[:, scales:], scale.view(torch.float16), bias.view(torch.float16)))
        return splits

    def _rows_of(self, t: int) -> Tensor:
        _, rows, dim, weight_ty, _ = self.embedding_specs[t]
        place = {EmbeddingLocation.HOST: "host", EmbeddingLocation.DEVICE: "dev"}
        buffer: Tensor = getattr(
            self, f"weights_{place.get(EmbeddingLocation(self.weights_physical_placements[t]), 'uvm')}"
        )
        width = rounded_row_size_in_bytes(dim, weight_ty, self.row_alignment, self.scale_bias_size_in_bytes)
        begin = self.weights_physical_offsets[t]
        return buffer.detach()[begin : begin + rows * width].view(rows, width)

    def split_embedding_weights(self, split_scale_shifts: bool = True) -> list[tuple[Tensor, Tensor | None]]:
        """Of each table views of its numbers, and of its scales and biases; or with False of whole rows, and None.

        All are uint8: numbers or rows [R, bytes], scales with biases [R, 4].
        """
        splits = self.split_embedding_weights_with_scale_bias(1 if split_scale_shifts else 0)
        return [(weights, scales) for weights, scales, _ in splits]

    def fill_random_weights(self) -> None:
        """Fill the numbers of all rows with random bytes; scales stay what they are."""
        self.initialize_weights()
        for weights, _ in self.split_embedding_weights():
            weights.copy_(torch.randint(0, 255, weights.shape, dtype=torch.uint8, device=weights.device))

    def assign_embedding_weights(self, q_weight_list: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Copy numbers [R, bytes], and scales with biases [R, 4], into the tables, as `split_embedding_weights` gives.

        Raises:
            ValueError: there are more or fewer tables, or one has scales that should not, or the other way round, or
                other rows; of several tables none has changed.
        """
        weights = self.split_embedding_weights()
        if len(q_weight_list) != len(weights):
            raise ValueError(f"there are {len(weights)} tables, got the weights of {len(q_weight_list)}")
        for t, ((to, to_scales), (rows, scales)) in enumerate(zip(weights, q_weight_list, strict=True)):
            if (to_scales is None) != (scales is None):
                needs = "no" if to_scales is None else "uint8 [rows, 4]"
                raise ValueError(f"table {t} of {type_name(self.embedding_specs[t][3])} has {needs} scales")
            for own, given in ((to, rows), (to_scales, scales)):
                if own is not None and given is not None and (given.shape != own.shape or given.is_floating_point()):
                    raise ValueError(f"table {t} has bytes {list(own.shape)}, got {given.dtype} {list(given.shape)}")
        for (to, to_scales), (rows, scales) in zip(weights, q_weight_list, strict=True):
            to.copy_(rows)
            if to_scales is not None and scales is not None:
                to_scales.copy_(scales)

    def embedding_inplace_update(
        self,
        update_table_indices: list[int],
        update_row_indices: list[list[int]],
        update_weights: list[Tensor],
    ) -> None:
        """Write whole rows, uint8 [n, bytes of a row], into some tables.

        Raises:
            ValueError, IndexError: a row is negative, or beyond its table.
        """
        tables = self.split_embedding_weights(split_scale_shifts=False)
        if negative := [row for rows in update_row_indices for row in rows if row < 0]:
            raise ValueError(f"update_row_indices must not be negative, got {negative[0]}")
        for t, rows, weights in zip(update_table_indices, update_row_indices, update_weights, strict=True):
            if rows:
                tables[t][0][torch.tensor(rows, device=self.current_device)] = weights

    def set_index_remappings_array(self, index_remapping: Sequence[Tensor | None]) -> None:
        """Prune tables: of each the row of every id [ids], -1 for ids without one; None of a table not pruned."""
        array, offsets = inference_ids.join_remappings(index_remapping, self.indices_dtype)
        self.index_remappings_array = array.to(self.current_device)
        self.index_remappings_array_offsets = offsets.to(self.current_device)
        self._set_original_rows(index_remapping)

    def set_index_remappings(
        self,
        index_remapping: Sequence[Tensor | None],
        pruning_hash_load_factor: float = 0.5,
        use_array_for_index_remapping: bool = True,
    ) -> None:
        """Prune tables by remappings [ids], as `set_index_remappings_array`; without an array no state dict has them.

        Raises:
            ValueError: there is not one remapping, or None, for each table.
        """
        if len(index_remapping) != len(self.embedding_specs):
            raise ValueError(f"there are {len(self.embedding_specs)} tables, got {len(index_remapping)} remappings")
        if use_array_for_index_remapping:
            self.set_index_remappings_array(index_remapping)
            return
        whole = [
            torch.arange(spec[1]) if remapping is None else remapping
            for spec, remapping in zip(self.embedding_specs, index_remapping, strict=True)
        ]
        array, offsets = inference_ids.join_remappings(whole, torch.int32)
        self.index_remapping_hash_table_cpu = (array.to(self.current_device), offsets.to(self.current_device))
        self._set_original_rows(whole)

    def _set_original_rows(self, remappings: Sequence[Tensor | None]) -> None:
        rows = [
            spec[1] if remapping is None else remapping.numel()
            for spec, remapping in zip(self.embedding_specs, remappings, strict=True)
        ]
        # no copy to a device at every lookup
        self._table_of = torch.tensor(self.feature_table_map, device=self.current_device)
        self.original_rows_per_table = torch.tensor(
            [rows[t] for t in self.feature_table_map], device=self.current_device, dtype=torch.int64
        )

    def reset_weights_placements_and_offsets(self, device: torch.device, location: int) -> None:
        """Say that tables are to be on another device and place; buffers stay until they are made anew."""
        self.reset_embedding_spec_location(device, EmbeddingLocation(location))
        self.initialize_physical_weights_placements_and_offsets()
        self.initialize_logical_weights_placements_and_offsets()

    def reset_embedding_spec_location(self, device: torch.device, target_location: EmbeddingLocation) -> None:
        """Change the device and the place that the specs name, and the alignment of rows with them."""
        require_locations([target_location.name], target_location.name == "HOST", self.enforce_hbm)
        self.current_device = torch.device(device)
        self.row_alignment = 1 if target_location.name == "HOST" else 16
        self.embedding_specs = [(*spec[:4], target_location) for spec in self.embedding_specs]

    def recompute_module_buffers(self) -> None:
        """Make buffers that are still on another device, such as meta, on this one; those of pruning come out empty."""
        if self.weights_tys.device == self.current_device or self.current_device.type == "meta":
            return
        self._register_tables()
        self._register_pruning(self.table_wise_cache_miss.numel() > 0)
        self.weights_uvm = torch.empty_like(self.weights_uvm, device=self.current_device)


def tuple_of(spec: Sequence[Any]) -> Spec:
    """A table's spec, checked.

    Raises:
        ValueError: a type of numbers that inference tables do not have, or rows that are no whole bytes.
    """
    names, rows, dim, weight_ty, location = spec
    bits = TYPES[type_name(weight_ty)][1]
    if rows < 0 or dim <= 0 or dim * bits % 8:
        raise ValueError(
            f"table {names!r}: rows must not be negative, and dim must be positive and fill whole bytes of {bits}-bit"
            f" numbers, got {rows} rows of {dim}"
        )
    return names, rows, dim, weight_ty, location


def _output_number(output_dtype: Any) -> int:
    name = getattr(output_dtype, "name", None)
    if name not in _OUTPUT_NUMBERS:
        raise ValueError(f"output_dtype must be one of {', '.join(_OUTPUT_NUMBERS)}, got {output_dtype}")
    number = _OUTPUT_NUMBERS[name]
    assert number in OUTPUTS
    return number


def _table_of_features(given: Sequence[int] | None, specs: Sequence[Spec], mode: PoolingMode) -> list[int]:
    table_of = list(range(len(specs))) if given is None else list(given)
    if not specs or sorted(set(table_of)) != list(range(len(specs))):
        raise ValueError(f"feature_table_map must name each of the {len(specs)} tables, got {table_of}")
    dims = sorted({spec[2] for spec in specs})
    if mode is PoolingMode.NONE and len(dims) > 1:
        raise ValueError(f"tables of several dims {dims} can be looked up pooled only, not with PoolingMode.NONE")
    return table_of
