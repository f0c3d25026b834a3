"""Settings of FBGEMM's optimizers that programs hand over by name; members, fields and defaults are FBGEMM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class DoesNotHavePrefix(Exception):
    """A name does not begin as it has to."""


class CounterWeightDecayMode(IntEnum):
    """How weight decay enters a step that counts how often rows came up."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    ADAGRADW = 3


class StepMode(IntEnum):
    """What steps of an ensemble are counted by."""

    NONE = 0
    USE_COUNTER = 1
    USE_ITER = 2


class LearningRateMode(IntEnum):
    """How the learning rate of a row depends on how often it came up."""

    EQUAL = -1
    TAIL_ID_LR_INCREASE = 0
    TAIL_ID_LR_DECREASE = 1
    COUNTER_SGD = 2


class GradSumDecay(IntEnum):
    """Whether Adagrad's sum decays."""

    NO_DECAY = -1
    CTR_DECAY = 0


@dataclass(frozen=True)
class TailIdThreshold:
    """From which count on a row is no rare one: a count, or a part of the largest."""

    val: float = 0
    is_ratio: bool = False


@dataclass(frozen=True)
class CounterBasedRegularizationDefinition:
    """Settings of `WeightDecayMode.COUNTER`."""

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: LearningRateMode = LearningRateMode.EQUAL
    grad_sum_decay: GradSumDecay = GradSumDecay.NO_DECAY
    tail_id_threshold: TailIdThreshold = field(default_factory=TailIdThreshold)
    max_counter_update_freq: int = 1000


@dataclass(frozen=True)
class CowClipDefinition:
    """Settings of `WeightDecayMode.COWCLIP`."""

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    weight_norm_coefficient: float = 0.0
    lower_bound: float = 0.0


@dataclass(frozen=True)
class GlobalWeightDecayDefinition:
    """Settings of `WeightDecayMode.DECOUPLE_GLOBAL`."""

    start_iter: int = 0
    lower_bound: float = 0.0


@dataclass(frozen=True)
class UserEnabledConfigDefinition:
    """Modes of optimizers that are off unless they are asked for."""

    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False
    writeback_first_feature_only: bool = False
    precompute_writeback: bool = False


@dataclass(frozen=True)
class EnsembleModeDefinition:
    """Settings of `OptimType.ENSEMBLE_ROWWISE_ADAGRAD`."""

    step_ema: float = 10000
    step_swap: float = 10000
    step_start: float = 0
    step_ema_coef: float = 0.6
    step_mode: StepMode = StepMode.USE_ITER


@dataclass(frozen=True)
class EmainplaceModeDefinition:
    """Settings of `OptimType.EMAINPLACE_ROWWISE_ADAGRAD`."""

    step_ema: float = 10
    step_start: float = 0
    step_ema_coef: float = 0.6
