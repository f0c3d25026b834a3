"""What `fused_params` of a sharder say of tables that train, in FBGEMM's words: obeyed, refused, or named in a warning.

An optimizer and its numbers, what of a table's lookups a plan sets too, and how FBGEMM stores rows: of that the size
of caches and the folder of files count where a table's compute kernel asks for them (`shardwise.planner.tiers`), and
the rest changes nothing. What would change a number and has no rule is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise._names import did_you_mean
from shardwise.embeddings import (
    LAMB,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    optimizer_spec,
)
from shardwise.embeddings.optim.fbgemm_types import BELOW_DEVICE, require_location

from ...planner.layout import BOUNDS_CHECKS, TRAINED_TYPES, TableOptions, Tier, bounds_check_name, type_name
from ...planner.tiers import FUSED_WORDS, CacheSettings, idle_settings, settings_from_fused, settings_of
from ..engine.settings import dtype_named
from ..engine.tables import Mark
from ..plan.caches import asked_tier
from ..plan.plan import ParameterSharding

# a table without an optimizer, as TorchRec has it
DEFAULT_OPTIMIZER: Mark = (torch.optim.SGD, {"lr": 0.01})
# FBGEMM's name of an optimizer -> ours, and what of fused_params it reads besides _COMMON
_MOMENTS = ("eps", "beta1", "beta2")
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, ()),
    "ADAGRAD": (torch.optim.Adagrad, ("eps", "initial_accumulator_value")),
    "ROWWISE_ADAGRAD": (RowWiseAdagrad, ("eps", "initial_accumulator_value", "max_norm")),
    "ADAM": (torch.optim.Adam, _MOMENTS),
    "LAMB": (LAMB, _MOMENTS),
    "LARS_SGD": (LarsSGD, ("momentum", "eta")),
    "PARTIAL_ROWWISE_ADAM": (PartialRowWiseAdam, _MOMENTS),
    "PARTIAL_ROWWISE_LAMB": (PartialRowWiseLAMB, _MOMENTS),
}
# those that are known and have no rule, and why
_WHOLE_TABLES = "it mixes all rows of a table every few steps, and a rule changes rows that were looked up alone"
_UNSERVED_OPTIMIZERS = {
    "NONE": 'for gradients alone give the plan compute_kernel "dense", and the parameters to an optimizer',
    "ENSEMBLE_ROWWISE_ADAGRAD": _WHOLE_TABLES,
    "EMAINPLACE_ROWWISE_ADAGRAD": _WHOLE_TABLES,
    **dict.fromkeys(
        ("ROWWISE_WEIGHTED_ADAGRAD", "MADGRAD", "SHAMPOO", "SHAMPOO_V2"), "FBGEMM does not serve it either"
    ),
}
_COMMON = (
    *("lr", "weight_decay", "weight_decay_mode", "stochastic_rounding", "seed"),
    *("gradient_clipping", "max_gradient"),
)
# numbers of optimizers, which one that does not read them leaves aside
_NUMBERS = ("eps", "beta1", "beta2", "momentum", "eta", "initial_accumulator_value")
# what of a table's lookups they set, besides the optimizer
_OF_LOOKUPS = ("output_dtype", "bounds_check_mode", "weights_precision", "location")
# of tables with rows below their device; prefetch_pipeline is the pipeline's to do
_OF_CACHES = (*FUSED_WORDS, "prefetch_pipeline")
# settings of caches, stores and kernels: no number depends on them
_IDLE = (
    "record_cache_metrics", "gather_uvm_cache_stats", "uvm_non_rowwise_momentum", "uvm_host_mapped",
    "use_experimental_tbe", "multipass_prefetch_config", "stats_reporter_config",
    "tbe_input_multiplexer_config", "embedding_table_index_type", "embedding_table_offset_type",
    "preallocated_host_buffers", "use_one_tbe_per_table", "embedding_cache_mode",
    "ssd_rocksdb_write_buffer_size", "ssd_rocksdb_shards", "gather_ssd_cache_stats", "use_passed_in_path",
    "enable_async_update", "bulk_init_chunk_size", "lazy_bulk_init_enabled",
    "kvzch_tbe_config", "load_ckpt_without_opt", "ps_hosts", "ps_client_thread_num", "ps_max_key_per_request",
    "ps_max_local_index_length", "__register_tbes_in_named_modules", "__register_quant_state_dict_split_scale_bias",
    "__register_tbe_row_alignment", "__register_tbe_bounds_check_mode", "__register_lengths_to_offsets_lookup",
    "__register_ssd_table_list", "__register_is_ssd_table",
)  # fmt: skip
# settings that would change a number, and why they are refused
_COUNTED, _STREAMED = "no rule counts how often rows came up", "rows are streamed to nobody"
_REFUSED = {
    "ensemble_mode": "ensembles of rows have no rule",
    "emainplace_mode": "moving averages of rows have no rule",
    "counter_based_regularization": _COUNTED,
    "cowclip_regularization": _COUNTED,
    "global_weight_decay": "rows decay when they are updated",
    "optimizer_state_dtypes": "optimizer states are fp32",
    "extra_optimizer_config": "Adam's correction counts the updates of a table",
    "enable_raw_embedding_streaming": _STREAMED,
    "res_params": _STREAMED,
    "res_store_shards": _STREAMED,
    "res_enabled_tables": _STREAMED,
    "is_qr_tbe": "tables are no quotients and remainders",
    **dict.fromkeys(
        ("embedding_specs", "feature_table_map", "pooling_mode", "device", "table_names", "embedding_shard_info"),
        "the collection and its plan say so",
    ),
}
# all that fused_params may be asked for
SETTINGS = (
    *("optimizer", "learning_rate", "max_norm"),
    *(*_COMMON, *_NUMBERS, *_OF_LOOKUPS, *_OF_CACHES, *_IDLE, *_REFUSED),
)


# a location of tables -> the compute kernel of those that say "fused"
_KERNELS: dict[str, str] = dict(zip(BELOW_DEVICE, ("fused_uvm", "fused_uvm_caching"), strict=True))


@dataclass(frozen=True)
class FusedSettings:
    """What a sharder's `fused_params` come to: an optimizer, what tables are set to, and where they are to lie."""

    optimizer: Mark
    options: TableOptions
    # settings of the optimizer that were given
    given: frozenset[str] = frozenset()
    location: Any = None
    caches: CacheSettings = CacheSettings()
    # settings of caches that were given and change something
    of_caches: tuple[str, ...] = ()

    def options_of(self, table: str, mark: Mark | None) -> TableOptions:
        """The same of one table; `mark` is the optimizer that it brings, whose own settings count instead."""
        if mark is None or not self.given:
            return self.options
        kept = {"lr" if name == "learning_rate" else name for name in mark[1]}
        passed_over = sorted(self.given - kept - {"lr", "stochastic_rounding"})
        if passed_over:
            warnings.warn(
                f"fused_params: {', '.join(passed_over)} have no effect on table {table!r}, which has an optimizer of"
                " its own in its backward: give them to that",
                stacklevel=4,
            )
        return replace(self.options, stochastic_rounding=None) if "stochastic_rounding" in kept else self.options

    def type_of(self, table: torch.Tensor, options: TableOptions) -> torch.dtype:
        """The type of a table's rows."""
        return table.dtype if options.weights_precision is None else dtype_named(options.weights_precision)

    def tier_of(
        self, name: str, sharding: ParameterSharding, table: torch.Tensor, mark: Mark | None, options: TableOptions,
        location: Any = None,
    ) -> Tier | None:  # fmt: skip
        """Where the rows of a table lie by its plan, and where that says nothing by these; None is on the device.

        Args:
            location: of the collection, where these say nothing.
        """
        dtype = self.type_of(table, options)
        kernel = sharding.compute_kernel
        if kernel in ("fused", "fused_triton"):
            kernel = _KERNELS.get(getattr(self.location or location, "name", ""), kernel)
        rule = None if mark is None else optimizer_spec(*mark, table=name).rule
        tier = asked_tier(sharding, table.shape[0], table.shape[1], dtype, kernel=kernel, fused=self.caches, rule=rule)
        if tier is not None and sharding.tier is None:
            for what, reason in idle_settings(sharding, str(dtype)).items():
                warnings.warn(f"the plan's {what} (table {name!r}) has no effect: {reason}", stacklevel=5)
        return tier

    def warn_of_caches(self, options: Iterable[TableOptions]) -> None:
        """Name the settings of caches, where no table has one."""
        if self.of_caches and all(table.tier is None for table in options):
            warnings.warn(
                f"fused_params: {', '.join(self.of_caches)} have no effect: the plan has no table with rows below its"
                " device (compute kernels fused_uvm, fused_uvm_caching and key_value)",
                stacklevel=4,
            )

    def reserved_of(self, sharding: ParameterSharding) -> int:
        """Bytes of a GPU that the cache of a table leaves free."""
        return settings_of(sharding).over(self.caches).reserved_bytes or 0

    def require_device(self, device: torch.device) -> None:
        """Raise ValueError where rows on this device cannot lie where they are to."""
        require_location(self.location, device)


def settings_from(fused_params: Mapping[str, Any], *, stacklevel: int = 2) -> FusedSettings:
    """What FBGEMM's settings mean; those that change nothing are named in one warning.

    Args:
        fused_params: see `BaseEmbeddingSharder`; None, False and 0 of what is not served ask for nothing.

    Raises:
        ValueError: a setting is not served, the optimizer has no fused rule, or a value is no good.
        TypeError: there is no setting of that name.
    """
    given = {"lr" if name == "learning_rate" else name: value for name, value in fused_params.items()}
    asked = given.pop("optimizer", "SGD")
    lookups = {name: given.pop(name) for name in _OF_LOOKUPS if name in given}
    caches = {name: given.pop(name) for name in _OF_CACHES if name in given}
    if isinstance(asked, type) and issubclass(asked, torch.optim.Optimizer):
        name, kind, reads = asked.__name__, asked, tuple(given)
    else:
        # FBGEMM's enum, its name or its value
        name = str(getattr(asked, "name", asked)).upper().removeprefix("EXACT_").replace("ROW_WISE", "ROWWISE")
        if name not in _OPTIMIZERS:
            reason = _UNSERVED_OPTIMIZERS.get(name)
            raise ValueError(
                f"fused_params: optimizer {asked!r} is not served{f' ({reason})' if reason else ''}; these are:"
                f" {', '.join(_OPTIMIZERS)}"
            )
        kind, reads = _OPTIMIZERS[name]
    unread = {setting: value for setting, value in given.items() if setting not in (*reads, *_COMMON)}
    _require_served(unread, name)
    idle = sorted(setting for setting, value in unread.items() if value)
    if idle:
        warnings.warn(f"fused_params: {', '.join(idle)} have no effect with {name}", stacklevel=stacklevel + 1)
    mark = (kind, {setting: value for setting, value in given.items() if setting not in unread})
    mark[1].setdefault("lr", DEFAULT_OPTIMIZER[1]["lr"])
    optimizer_spec(*mark, table="(fused_params)")
    options = replace(_options(lookups), stochastic_rounding=given.get("stochastic_rounding"))
    return FusedSettings(
        mark, options, frozenset(given), _location(lookups.get("location")), settings_from_fused(caches),
        tuple(sorted(name for name, value in caches.items() if value and name != "enforce_hbm")),
    )  # fmt: skip


def name_an_optimizer(fused_params: Mapping[str, Any] | None) -> bool:
    """Whether a sharder's `fused_params` say how its tables train; settings of lookups alone do not."""
    return bool(set(fused_params or ()).difference(_OF_LOOKUPS))


def optimizer_from(fused_params: Mapping[str, Any]) -> Mark:
    """The optimizer class and keyword arguments that FBGEMM's settings mean. Raises as `settings_from`."""
    return settings_from(fused_params, stacklevel=3).optimizer


def _require_served(unread: Mapping[str, Any], optimizer: str) -> None:
    """Check what an optimizer does not read: settings that there are, none of which would change a number."""
    for name, value in unread.items():
        if name == "max_norm" and value:
            raise ValueError(
                f"fused_params: max_norm={value!r} is not served with {optimizer}: ROWWISE_ADAGRAD cuts rows to a norm"
            )
        if name in _REFUSED and value:
            raise ValueError(f"fused_params: {name}={value!r} is not served: {_REFUSED[name]}; leave it out")
        if name not in SETTINGS:
            raise TypeError(f"fused_params: there is no setting {name!r}{did_you_mean(name, SETTINGS)}")


def _options(lookups: Mapping[str, Any]) -> TableOptions:
    """What tables are set to, where a plan says nothing of it."""
    named: dict[str, Any] = {}
    for name, read, known in (
        ("output_dtype", type_name, TRAINED_TYPES),
        ("weights_precision", type_name, TRAINED_TYPES),
        ("bounds_check_mode", bounds_check_name, BOUNDS_CHECKS),
    ):
        value = lookups.get(name)
        if value is not None:
            named[name] = read(value)
            if named[name] not in known:
                raise ValueError(f"fused_params: {name} must be one of {', '.join(known)}, got {value!r}")
    return TableOptions(**named)


def _location(asked: Any) -> Any:
    """Where rows are to lie: on the device of the shards or below it, or on the host where that is the device."""
    if asked is not None:
        if not hasattr(asked, "name"):
            raise ValueError(f"fused_params: location must be an EmbeddingLocation, got {asked!r}")
        # on a GPU a table on the host is refused where it is sharded
        require_location(asked, "cpu")
    return asked
