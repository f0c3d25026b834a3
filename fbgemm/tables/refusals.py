"""What FBGEMM's tables take and these do not: each setting by its name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.embeddings.optim.fbgemm_types import ComputeDevice, EmbeddingLocation, SparseType
from shardwise.embeddings.optim.optimizers import WeightDecayMode

from .optimizer_settings import UserEnabledConfigDefinition


def refuse_settings(
    *,
    max_norm: float,
    weight_decay_mode: WeightDecayMode,
    counter_based_regularization: object | None,
    cowclip_regularization: object | None,
    uvm_non_rowwise_momentum: bool,
    stats_reporter_config: object | None,
    optimizer_state_dtypes: Mapping[str, SparseType] | None,
    extra_optimizer_config: UserEnabledConfigDefinition | None,
    tbe_input_multiplexer_config: object | None,
    enable_raw_embedding_streaming: bool,
    is_qr_tbe: bool,
    preallocated_host_buffers: Mapping[str, Tensor] | None,
) -> None:
    """Refuse what asks for something that is not done here.

    Raises:
        ValueError: names the first such setting, its value, and why.
    """
    dtypes = [dtype for dtype in (optimizer_state_dtypes or {}).values() if dtype is not SparseType.FP32]
    extra = [name for name, value in vars(extra_optimizer_config or UserEnabledConfigDefinition()).items() if value]
    buffers = sorted(preallocated_host_buffers or ())
    modes = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
    asked: list[tuple[str, Any, Any, str]] = [
        ("max_norm", max_norm, max_norm, "rows are not cut to a norm"),
        ("weight_decay_mode", weight_decay_mode, weight_decay_mode not in modes, "NONE, L2 and DECOUPLE are"),
        *(
            (name, value, value is not None, "steps do not count how often rows came up")
            for name, value in (
                ("counter_based_regularization", counter_based_regularization),
                ("cowclip_regularization", cowclip_regularization),
            )
        ),
        (
            "uvm_non_rowwise_momentum",
            uvm_non_rowwise_momentum,
            uvm_non_rowwise_momentum,
            "states lie with their tables",
        ),
        ("stats_reporter_config", stats_reporter_config, stats_reporter_config, "nothing is reported"),
        ("optimizer_state_dtypes", optimizer_state_dtypes, dtypes, "states are FP32"),
        ("extra_optimizer_config", extra, extra, "Adam's correction counts updates of the tables"),
        (
            "tbe_input_multiplexer_config",
            tbe_input_multiplexer_config,
            tbe_input_multiplexer_config,
            "no batch goes elsewhere",
        ),
        (
            "enable_raw_embedding_streaming",
            enable_raw_embedding_streaming,
            enable_raw_embedding_streaming,
            "no row goes elsewhere",
        ),
        ("is_qr_tbe", is_qr_tbe, is_qr_tbe, "tables are whole"),
        (
            "preallocated_host_buffers",
            buffers,
            buffers,
            "tables make their own memory; write into split_embedding_weights()",
        ),
    ]
    for name, value, refused, why in asked:
        if refused:
            raise ValueError(f"{name}={value!r} is not served: {why}")


def warn_of_unread(
    *, ensemble_mode: object | None, emainplace_mode: object | None, global_weight_decay: object | None
) -> None:
    """Say that settings of optimizers that are refused have no effect on others, as they have none in FBGEMM."""
    given = {
        "ensemble_mode": ensemble_mode,
        "emainplace_mode": emainplace_mode,
        "global_weight_decay": global_weight_decay,
    }
    if unread := [name for name, value in given.items() if value is not None]:
        warnings.warn(f"{', '.join(unread)} without effect: of optimizers that are not served", stacklevel=3)


def require_places(specs: Sequence[tuple[int, int, EmbeddingLocation, ComputeDevice]]) -> bool:
    """Whether the tables are on the CPU.

    Raises:
        ValueError: they are neither all of them in HOST memory for the CPU nor all on DEVICE for CUDA; says which.
    """
    devices = {ComputeDevice(spec[3]).name for spec in specs}
    places = {EmbeddingLocation(spec[2]).name for spec in specs}
    if devices not in ({"CPU"}, {"CUDA"}):
        raise ValueError(
            f"embedding_specs: tables are all for ComputeDevice.CPU or all for CUDA, got {sorted(devices)}"
        )
    wanted = "HOST" if devices == {"CPU"} else "DEVICE"
    if places != {wanted}:
        raise ValueError(
            f"embedding_specs: tables for ComputeDevice.{devices.pop()} lie in EmbeddingLocation.{wanted}, got"
            f" {sorted(places)}: there are no caches over host memory"
        )
    return wanted == "HOST"
