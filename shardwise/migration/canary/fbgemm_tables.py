"""Tables of one of FBGEMM's modules as groups of ours: in FBGEMM's own memory, or in a copy of it.

A run is tables that lie side by side in that memory and have one dim: a group looks them up and trains them where they
are. What is read of FBGEMM's module is by the names that it has in release 1.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.fbgemm_types import OptimType, PoolingMode, SparseType
from shardwise.embeddings.optim.optimizers import WeightDecayMode
from shardwise.embeddings.policy import LookupPolicy
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.embeddings.tables.table_layout import LookupFeature, OptimizerSpec, TableShape
from shardwise.fbgemm.tables.optimizers import OptimizerArgs, fused_spec, require_optimizer
from shardwise.fbgemm.tables.variable_batch import cut_to_ranks, pad_bags
from shardwise.kernels import BoundsCheckMode, rule_named

from .batch import Ids, Sizes

# attributes of FBGEMM's module and the values with which nothing else happens than a lookup and an update
_PLAIN = {
    "use_rowwise_bias_correction": False,
    "use_writeback_bwd_prehook": False,
    "enable_raw_embedding_streaming": False,
    "_used_rowwise_adagrad_with_counter": False,
    "_used_rowwise_adagrad_with_global_weight_decay": False,
    "is_qr_tbe": False,
}
_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
# optimizers whose forward FBGEMM does not count
_UNCOUNTED = ("SGD", "EXACT_SGD", "LARS_SGD", "EXACT_ADAGRAD")


def require_served(tables: Any, who: str) -> None:
    """Refuse tables that ours would train otherwise than FBGEMM.

    Raises:
        ValueError: names the tables, the setting and its value.
    """
    if type(tables).__name__ != "SplitTableBatchedEmbeddingBagsCodegen" or not hasattr(tables, "prepare_inputs"):
        raise ValueError(
            f"{who}: a canary serves tables of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen as of 1.8 (compute kernel"
            f" 'fused'), these are of {type(tables).__module__}.{type(tables).__name__}"
        )
    places = {spec[2].name for spec in tables.embedding_specs}
    if not places <= {"HOST", "DEVICE"} or (places == {"HOST"}) != bool(tables.use_cpu):
        raise ValueError(
            f"{who}: a canary serves tables that lie on the device that trains them, not in EmbeddingLocation"
            f" {', '.join(sorted(places))}: choose the compute kernel 'fused' for them"
        )
    require_optimizer(_optimizer_of(tables, who))
    args, mode = tables.optimizer_args, int(tables.weight_decay_mode)
    odd = [(name, getattr(tables, name)) for name in _PLAIN if getattr(tables, name, _PLAIN[name]) != _PLAIN[name]]
    odd += [("max_norm", args.max_norm)] if args.max_norm else []
    odd += [("weight_decay_mode", tables.weight_decay_mode)] if mode not in _DECAYS else []
    odd += [("optimizer", tables.optimizer)] if tables.optimizer.name == "NONE" else []
    for name in ("weights_precision", "output_dtype"):
        value = getattr(tables, name)
        number = value if isinstance(value, int) else value.as_int()
        if number not in {kind.as_int() for kind in (SparseType.FP32, SparseType.FP16, SparseType.BF16)}:
            odd.append((name, value))
    odd += [("an optimizer state in", state.dtype) for state in _states(tables, 0) if state.dtype != torch.float32]
    if odd:
        raise ValueError(f"{who}: a canary does not serve {odd[0][0]}={odd[0][1]}: leave these tables to FBGEMM")


def runs_of(tables: Any, wanted: Sequence[int]) -> list[list[int]]:
    """Numbers of tables in runs: neighbours in memory, of one dim."""
    weights: list[Tensor] = tables.split_embedding_weights()
    runs: list[list[int]] = []
    for table in sorted(wanted):
        before = runs[-1][-1] if runs else None
        if before is not None and before + 1 == table and _adjacent(tables, weights, before, table):
            runs[-1].append(table)
        else:
            runs.append([table])
    return runs


def _adjacent(tables: Any, weights: Sequence[Tensor], before: int, table: int) -> bool:
    if weights[before].shape[1] != weights[table].shape[1]:
        return False
    pairs = [(weights[before], weights[table])]
    pairs += zip(_states(tables, before), _states(tables, table), strict=True)
    return all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr() for a, b in pairs)


def _states(tables: Any, table: int) -> list[Tensor]:
    states: list[list[Tensor]] = tables.split_optimizer_states()
    return states[table] if states else []


def _optimizer_of(tables: Any, who: str) -> OptimType:
    try:
        return OptimType(tables.optimizer.value)
    except ValueError:
        raise ValueError(f"{who}: a canary does not serve optimizer={tables.optimizer}: leave it to FBGEMM") from None


def _spec(tables: Any, who: str) -> OptimizerSpec:
    args = OptimizerArgs(**{name: getattr(tables.optimizer_args, name) for name in OptimizerArgs._fields})
    return fused_spec(_optimizer_of(tables, who), float(tables.get_learning_rate()), args, who=who)


class Run:
    """Neighbouring tables of a module of FBGEMM's in a group of ours.

    Args:
        tables: FBGEMM's module.
        numbers: of its tables, a run.
        names: of all tables of the module.
        copied: train a copy, and leave FBGEMM's memory alone.
    """

    def __init__(self, tables: Any, numbers: Sequence[int], names: Sequence[str], *, copied: bool) -> None:
        self.tables, self.numbers, self._copied = tables, list(numbers), copied
        self.names = [names[t] for t in numbers]
        self.features = [f for f, table in enumerate(tables.feature_table_map) if table in set(numbers)]
        self.dims = [tables.embedding_specs[tables.feature_table_map[f]][1] for f in self.features]
        self._who = ", ".join(self.names)
        mode = PoolingMode(int(tables.pooling_mode))
        self._sequence, mean = mode is PoolingMode.NONE, mode is PoolingMode.MEAN
        weights = self._weights()
        shapes = [TableShape(name, w.shape[0], w.shape[1]) for name, w in zip(self.names, weights, strict=True)]
        of_feature = [self.numbers.index(tables.feature_table_map[f]) for f in self.features]
        lookups = [LookupFeature(f"{self.names[t]}/{n}", t, mean) for n, t in enumerate(of_feature)]
        # FBGEMM has checked the ids, and put others in the place of bad ones
        policy = LookupPolicy(BoundsCheckMode.NONE, output_dtype=_output_dtype(tables))
        self.group = TableGroup(
            shapes, lookups, dtype=weights[0].dtype, device=weights[0].device if copied else torch.device("meta"),
            optimizer=_spec(tables, self._who), policy=policy,
        )  # fmt: skip
        self.group.parameters = [nn.Parameter(torch.empty(0, device=weights[0].device))] * len(shapes)
        self._args: Any = tables.optimizer_args
        self._place: tuple[int, ...] = ()
        if copied:
            self.copy()

    def _weights(self) -> list[Tensor]:
        """The tables in FBGEMM's memory; `.data` counts changes apart, or autograd refused FBGEMM's backward."""
        weights = self.tables.split_embedding_weights()
        return [weights[t].data for t in self.numbers]

    def _states_of(self, number: int) -> list[Tensor]:
        return [state.data for state in _states(self.tables, self.numbers[number])]

    def look_up(self, ids: Ids, sizes: Sizes | None) -> Tensor:
        """What the tables give for their features' ids: [B, sum of dims], [N, dim], or one vector (`sizes`)."""
        self._follow()
        if self._sequence:
            return self.group.sequence(ids.indices, ids.offsets)
        if sizes is None:
            return self.group.pooled(*ids)
        return self.group.pooled(ids.indices, pad_bags(ids.offsets, sizes).to(ids.indices.dtype), ids.weights)

    def cut(self, output: Tensor, sizes: Sizes | None) -> Tensor:
        """The lookup's output as FBGEMM lays it out."""
        return output if sizes is None or self._sequence else cut_to_ranks(output, sizes, self.dims)

    def _follow(self) -> None:
        """Take over what was changed in FBGEMM's module since: memory, learning rate, settings, the count of steps."""
        if not self._copied:
            self._adopt()
        if self._args is not self.tables.optimizer_args:
            self._args = self.tables.optimizer_args
            spec = _spec(self.tables, self._who)
            self.group.optimizer, self.group.lr = spec, spec.lr
            self.group.hyper = spec.hyper(self.group.device)
        rate = float(self.tables.get_learning_rate())
        if rate != self.group.lr:
            self.group.set_lr(rate)
        optimizer = self.group.optimizer
        assert optimizer is not None
        if rule_named(optimizer.rule).counts_steps and torch.is_grad_enabled():
            # FBGEMM has counted this forward, our update will
            self.group.step.fill_(int(self.tables.iter_cpu.item()) - 1)

    def _adopt(self) -> None:
        first = [self._weights()[0], *self._states_of(0)]
        place = tuple(tensor.data_ptr() for tensor in first)
        if place == self._place:
            return
        rows, dim = sum(table.rows for table in self.group.tables), self.group.tables[0].dim
        flat, *states = [
            tensor.as_strided((rows * (dim if tensor.dim() == 2 else 1),), (1,), tensor.storage_offset())
            for tensor in first
        ]
        self.group.adopt(flat, states)
        self._place = place

    @torch.no_grad()
    def copy(self, rows: Sequence[Tensor] | None = None) -> None:
        """Take FBGEMM's rows and their states over: all, or of each table some."""
        for number, weights in enumerate(self._weights()):
            places = slice(None) if rows is None else rows[number]
            for own, theirs in self.pairs(number, weights):
                own[places] = theirs[places]

    def pairs(self, number: int, weights: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """A table and its states, ours and FBGEMM's."""
        weights = self._weights()[number] if weights is None else weights
        own = [state for name, state in self.group.state_views(number).items() if name != "step"]
        return [(self.group.view(number), weights), *zip(own, self._states_of(number), strict=True)]

    @property
    def copied_bytes(self) -> int:
        """Of tables and states that are there only for the copy."""
        own = (self.group.flat, *self.group.states) if self._copied else ()
        return sum(tensor.numel() * tensor.element_size() for tensor in own)


def bytes_of(tables: Any, numbers: Sequence[int]) -> tuple[int, int]:
    """Bytes of tables of FBGEMM's module, and of their optimizer states."""
    weights = tables.split_embedding_weights()
    states = [state for t in numbers for state in _states(tables, t)]
    return tuple(sum(x.numel() * x.element_size() for x in kind) for kind in ([weights[t] for t in numbers], states))  # type: ignore[return-value]


def count_step(tables: Any) -> None:
    """Have FBGEMM's module count a step for which it was not called, as a checkpoint of it has the number."""
    if tables.optimizer.name in _UNCOUNTED or not torch.is_grad_enabled():
        return
    if int(tables.iter_cpu.item()) == 0:
        # of a checkpoint that was loaded
        tables.iter_cpu.fill_(int(tables.iter.item()))
    tables.iter_cpu.add_(1)
    tables.iter.add_(1)


def _output_dtype(tables: Any) -> torch.dtype:
    return SparseType.from_int(int(tables.output_dtype)).as_dtype()
