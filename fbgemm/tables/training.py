"""Tables that train in their backward, as FBGEMM's programs make and call them.

Shapes: T features of tables [R_t, D_t], B samples; indices [N], offsets [T * B + 1], per-sample weights [N]; output
[B, sum of D_t], or [N, D] where nothing is pooled.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.fbgemm_types import (
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    MultiPassPrefetchConfig,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
)
from shardwise.embeddings.optim.optimizers import WeightDecayMode
from shardwise.embeddings.policy import LookupPolicy
from shardwise.kernels import BoundsCheckMode

from .buffers import Parts
from .optimizer_settings import (
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    UserEnabledConfigDefinition,
)
from .optimizers import OptimizerArgs, fused_spec, require_optimizer, state_names, warn_of_decay
from .refusals import refuse_settings, require_places, warn_of_unread
from .sparse_gradient import look_up_with_sparse_gradient
from .table_batched import TableBatched, features_of, require_shapes, trained_dtype
from .variable_batch import cut_to_ranks

# optimizers whose state dict has the count of steps
_COUNTED = (OptimType.ADAM, OptimType.LAMB, OptimType.PARTIAL_ROWWISE_ADAM, OptimType.PARTIAL_ROWWISE_LAMB)
_PLACES = ("dev", "host", "uvm")


class SplitTableBatchedEmbeddingBagsCodegen(TableBatched):
    """Tables of one optimizer that runs in their backward: one lookup and one update for all of them.

    Every optimizer below is served on the CPU too. A bad index counts as no index, by WARNING and IGNORE; offsets out
    of order always raise. Steps are counted by updates, not by forwards. `eval()` changes nothing: what is looked up
    with gradients trains.

    Where dims differ, tables lie in `weights_dev` (`weights_host` on the CPU) by their dims, each from
    `weights_physical_offsets` on; a state dict has them in their own order, as FBGEMM's, and loads FBGEMM's.

    Args:
        embedding_specs: (rows, dim, location, compute device) of each table: HOST and CPU, or DEVICE and CUDA.
        feature_table_map: the table of each feature; by default each table has one.
        cache_algorithm, cache_load_factor, cache_sets, cache_reserved_memory, cache_precision: of caches, which no
            table has: they change nothing, as in FBGEMM with these locations.
        record_cache_metrics, gather_uvm_cache_stats, prefetch_pipeline, multipass_prefetch_config: the same.
        weights_precision, output_dtype: FP32, FP16 or BF16.
        enforce_hbm, uvm_host_mapped, use_experimental_tbe: where and how FBGEMM does its work; nothing is to be chosen.
        optimizer: (EXACT_)SGD, EXACT_ADAGRAD, (EXACT_)ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB,
            PARTIAL_ROWWISE_LAMB, LARS_SGD; or NONE, whose backward gives the weights a sparse gradient (dims of all
            tables have to be equal).
        stochastic_rounding: whether rows of FP16 and BF16 are rounded up or down by chance.
        gradient_clipping, max_gradient: cut the gradient of the output to +-`max_gradient`.
        learning_rate, eps, momentum, eta, beta1, beta2: of the optimizer; the first may be a tensor [1] or 0-dim.
        weight_decay: taken from the row by itself (Adam), part of the step (LAMB, LARS), by `weight_decay_mode`
            (rowwise Adagrad); others have none and warn, as does rowwise Adagrad with mode NONE.
        weight_decay_mode: NONE, L2 or DECOUPLE.
        ensemble_mode, emainplace_mode, global_weight_decay: of what is refused; a warning says so.
        pooling_mode: how the rows of a bag become one.
        device: where tables are; by default the compute device.
        bounds_check_mode: what an index outside its table does.
        table_names: for messages.
        embedding_table_index_type, embedding_table_offset_type, embedding_shard_info, res_params: change nothing here.
        max_norm, counter_based_regularization, cowclip_regularization: refused where they ask for something.
        uvm_non_rowwise_momentum, stats_reporter_config, optimizer_state_dtypes, extra_optimizer_config: the same.
        tbe_input_multiplexer_config, enable_raw_embedding_streaming, is_qr_tbe: the same.
        preallocated_host_buffers: the same; buffers of any shape.

    Raises:
        ValueError: an argument is not served, or the tables do not fit it; names it.

    Example:
        >>> spec = (10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
        >>> tables = SplitTableBatchedEmbeddingBagsCodegen([spec], optimizer=OptimType.EXACT_ROWWISE_ADAGRAD)
        >>> tables(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).sum().backward()
        >>> [list(states) for states in tables.get_optimizer_state()]
        [['sum']]
    """

    rows_per_table: Tensor
    bounds_check_warning: Tensor
    weights_dev: Tensor
    weights_host: Tensor
    weights_uvm: Tensor
    weights_offsets: Tensor
    weights_placements: Tensor
    iter: Tensor

    def __init__(
        self,
        embedding_specs: list[tuple[int, int, EmbeddingLocation, ComputeDevice]],
        feature_table_map: list[int] | None = None,
        cache_algorithm: CacheAlgorithm = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: SparseType | None = None,
        weights_precision: SparseType = SparseType.FP32,
        output_dtype: SparseType = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: OptimType = OptimType.EXACT_SGD,
        record_cache_metrics: RecordCacheMetrics | None = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float | Tensor = 0.01,
        eps: float = 1.0e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: EnsembleModeDefinition | None = None,
        emainplace_mode: EmainplaceModeDefinition | None = None,
        counter_based_regularization: CounterBasedRegularizationDefinition | None = None,
        cowclip_regularization: CowClipDefinition | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: object | None = None,
        table_names: list[str] | None = None,
        optimizer_state_dtypes: dict[str, SparseType] | None = None,
        multipass_prefetch_config: MultiPassPrefetchConfig | None = None,
        global_weight_decay: GlobalWeightDecayDefinition | None = None,
        uvm_host_mapped: bool = False,
        extra_optimizer_config: UserEnabledConfigDefinition | None = None,
        tbe_input_multiplexer_config: object | None = None,
        embedding_table_index_type: torch.dtype = torch.int64,
        embedding_table_offset_type: torch.dtype = torch.int64,
        embedding_shard_info: list[tuple[int, int, int, int]] | None = None,
        enable_raw_embedding_streaming: bool = False,
        res_params: object | None = None,
        is_qr_tbe: bool = False,
        preallocated_host_buffers: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        require_optimizer(optimizer)
        refuse_settings(
            max_norm=max_norm,
            weight_decay_mode=weight_decay_mode,
            counter_based_regularization=counter_based_regularization,
            cowclip_regularization=cowclip_regularization,
            uvm_non_rowwise_momentum=uvm_non_rowwise_momentum,
            stats_reporter_config=stats_reporter_config,
            optimizer_state_dtypes=optimizer_state_dtypes,
            extra_optimizer_config=extra_optimizer_config,
            tbe_input_multiplexer_config=tbe_input_multiplexer_config,
            enable_raw_embedding_streaming=enable_raw_embedding_streaming,
            is_qr_tbe=is_qr_tbe,
            preallocated_host_buffers=preallocated_host_buffers,
        )
        warn_of_unread(
            ensemble_mode=ensemble_mode, emainplace_mode=emainplace_mode, global_weight_decay=global_weight_decay
        )
        self.uuid = str(uuid.uuid4())
        self.embedding_specs, self.table_names = embedding_specs, table_names
        rows, dims = [spec[0] for spec in embedding_specs], [spec[1] for spec in embedding_specs]
        self.dims, self.pooling_mode = tuple(dims), PoolingMode(pooling_mode)
        self.is_nobag, self.mixed_D = self.pooling_mode is PoolingMode.NONE, len(set(dims)) > 1
        require_shapes(rows, dims, self.pooling_mode)
        if optimizer is OptimType.NONE and self.mixed_D:
            raise ValueError(f"optimizer=OptimType.NONE wants tables of one dim, got {sorted(set(dims))}")
        self.use_cpu = require_places(embedding_specs)
        self.use_mtia = False
        self.feature_table_map = features_of(feature_table_map, len(rows))
        dtype, mode = trained_dtype(weights_precision, "weights_precision"), BoundsCheckMode(bounds_check_mode)
        policy = LookupPolicy(mode, output_dtype=trained_dtype(output_dtype, "output_dtype"))
        self.weights_precision, self.output_dtype = weights_precision, output_dtype.as_int()
        self.bounds_check_mode_int = int(mode if mode is BoundsCheckMode.NONE else mode.effect)
        self.optimizer, self.stochastic_rounding, self.weight_decay_mode = (
            optimizer,
            stochastic_rounding,
            weight_decay_mode,
        )
        self.prefetch_pipeline, self.multipass_prefetch_config = prefetch_pipeline, multipass_prefetch_config
        self.record_cache_metrics = record_cache_metrics or RecordCacheMetrics(False, False)
        self.cache_algorithm, self.gather_uvm_cache_stats = cache_algorithm, gather_uvm_cache_stats
        self.embedding_table_index_type = embedding_table_index_type
        self.embedding_table_offset_type = embedding_table_offset_type
        self.optimizer_args = OptimizerArgs(
            stochastic_rounding, gradient_clipping, max_gradient, max_norm, eps, beta1, beta2, weight_decay,
            int(weight_decay_mode), eta, momentum,
        )  # fmt: skip
        warn_of_decay(optimizer, self.optimizer_args)
        names = table_names or [f"table-{t}" for t in range(len(rows))]
        if len(names) != len(rows):
            raise ValueError(f"table_names are {len(names)} for {len(rows)} tables")
        self._who = ", ".join(names)
        self._lay_tables(
            rows, dims, names=names, dtype=dtype, device=_device(device, self.use_cpu),
            optimizer=fused_spec(optimizer, float(learning_rate), self.optimizer_args, who=self._who), policy=policy,
        )  # fmt: skip
        self.total_hash_size, self.max_D_cache = sum(rows), 0
        self._describe("rows_per_table", [rows[t] for t in self.feature_table_map])
        self._describe("bounds_check_warning", [0])
        self.placeholder_autograd_tensor = nn.Parameter(torch.zeros(0, device=self._group.device))
        self._lay_buffers()
        self._show()

    def _lay_buffers(self) -> None:
        """Register what a state dict of FBGEMM's has besides, most of it empty."""
        device, place = self._group.device, int(self.embedding_specs[0][2])
        for name, parts in self._shown_parts().items():
            setattr(self, f"{name}_physical_offsets", list(parts.starts))
            setattr(self, f"{name}_physical_placements", [EmbeddingLocation(place)] * len(self.dims))
            self._describe(f"{name}_offsets", [parts.starts[t] for t in self.feature_table_map])
            self._describe(f"{name}_placements", [place] * len(self.feature_table_map), torch.int32)
            dtype = self._group.flat.dtype if name == "weights" else torch.float32
            for other in _PLACES:
                if other != self._place:
                    self.register_buffer(f"{name}_{other}", torch.empty(0, dtype=dtype, device=device))
        self._describe("table_wise_cache_miss", [])
        self.register_buffer("lxu_cache_weights", torch.empty(0, 0, dtype=self._group.flat.dtype, device=device))
        if self.optimizer not in _COUNTED:
            self._non_persistent_buffers_set.add("iter")

    @property
    def _place(self) -> str:
        """What the names of buffers end with."""
        return "host" if self.use_cpu else "dev"

    def _shown_parts(self) -> dict[str, Parts]:
        """The tables, and each of their states, and how they lie in a buffer."""
        kinds = {f"momentum{n}": view.dim() for n, view in enumerate(self._states_of(0), start=1)}
        return {
            "weights": self._parts["element"],
            **{name: self._parts["row" if dim == 1 else "element"] for name, dim in kinds.items()},
        }

    def _buffers_of_tables(self) -> dict[str, tuple[Tensor, Parts]]:
        group, place = self._group, self._place
        flat = group.flat.view(-1, self.max_D) if self.optimizer is OptimType.NONE else group.flat
        buffers = dict(zip(self._shown_parts().items(), (flat, *group.states), strict=True))
        shown = {f"{name}_{place}": (buffer, parts) for (name, parts), buffer in buffers.items()}
        return {**shown, "iter": (group.step, Parts((0,), (1,)))}

    def _buffers_of_starts(self) -> dict[str, Parts]:
        return {f"{name}_offsets": parts for name, parts in self._shown_parts().items()}

    def _shown_as_parameter(self, name: str) -> bool:
        # as FBGEMM has it: on the CPU, and of weights that have a gradient
        return name != "iter" and (self.use_cpu or self.optimizer is OptimType.NONE)

    def _show(self) -> None:
        super()._show()
        # frozen, they leave the tables alone
        self._group.parameters = [self.placeholder_autograd_tensor] * len(self.dims)

    def _given(self, loaded: dict[str, Any], prefix: str, name: str) -> Tensor | None:
        """That of the place where it is not empty: a checkpoint of a CPU is one for CUDA, too."""
        given = super()._given(loaded, prefix, name)
        if name == "iter":
            return given
        for other in _PLACES:
            key = prefix + name.removesuffix(self._place) + other
            if not key.endswith(name) and key in loaded:
                if loaded[key].numel() and (given is None or not given.numel()):
                    given = loaded[key]
                loaded[key] = self._buffers[key.removeprefix(prefix)]
        return given

    def _own_names(self) -> list[str]:
        return [*super()._own_names(), *(f"{name}_placements" for name in self._shown_parts())]

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: Tensor | None = None,
        hash_zch_runtime_meta: Tensor | None = None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Look a batch up: [B, total_D], or [N, D] where nothing is pooled. The backward trains the tables.

        Args:
            indices: [N] rows, feature by feature, sample by sample.
            offsets: [T * B + 1] where the bags begin.
            per_sample_weights: [N] by which rows are scaled; it has a gradient. Nothing is scaled without pooling.
            feature_requires_grad: [T] of which features the weights have one; of all by default.
            batch_size_per_feature_per_rank: `[T][R]`; the output is then one vector, the rows of rank after rank.
            total_unique_indices, hash_zch_identities, hash_zch_runtime_meta: of any shape; nothing here needs them.
            vbe_output, vbe_output_offsets: have to be None: no tensor, of any shape, is taken.

        Raises:
            IndexError, ValueError, TypeError: an index (FATAL), an offset, a size, a type or a device is bad; says
                which. On CUDA a bad index or offset raises at the next forward.
        """
        if vbe_output is not None or vbe_output_offsets is not None:
            raise ValueError("vbe_output is not served: take what forward returns")
        self._take_back()
        sizes, group = batch_size_per_feature_per_rank, self._group
        ids, starts, weights = self._prepare(indices, offsets, per_sample_weights, feature_requires_grad, sizes)
        if self.optimizer is OptimType.NONE:
            shown = getattr(self, f"weights_{self._place}")
            pooling = "sequence" if self.is_nobag else group.pooling
            out = look_up_with_sparse_gradient(shown, group, ids, starts, weights, pooling)
        else:
            group._anchor = self._anchor()
            out = group.sequence(ids, starts) if self.is_nobag else group.pooled(ids, starts, weights)
            if out.requires_grad and not torch.compiler.is_compiling():
                # what `weights_host.data = ...` puts in place until then is what the backward trains
                out.register_hook(self._before_update)  # type: ignore[no-untyped-call]
        return out if sizes is None else cut_to_ranks(out, sizes, group.dims)

    def _before_update(self, grad: Tensor) -> None:
        del grad
        self._take_back()

    def _anchor(self) -> Tensor:
        """What lookups hang on, so that backwards reach every parameter: DistributedDataParallel waits for them."""
        names = self._buffers_of_tables()
        shown = [param for name, param in self._parameters.items() if name in names and param is not None]
        if not shown or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.placeholder_autograd_tensor
        return _Reached.apply(self.placeholder_autograd_tensor, *shown)  # type: ignore[no-any-return, no-untyped-call]

    def _states_of(self, table: int) -> list[Tensor]:
        return [state for name, state in self._group.state_views(table).items() if name != "step"]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Of each table its states in FBGEMM's order, [R] or [R, D]: writing into them changes the states.

        SGD has none, and an empty list.

        Raises:
            NotImplementedError: there is no optimizer.
        """
        self._require_fused("split_optimizer_states")
        self._take_back()
        if not self._group.states:
            return []
        return [self._states_of(t) for t in range(len(self.dims))]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Of each table its states by torch's names for them: sum; exp_avg and exp_avg_sq; momentum_buffer (LARS).

        Raises:
            NotImplementedError: there is no optimizer.
        """
        names = state_names(self.optimizer)
        return [dict(zip(names, states, strict=True)) for states in self.split_optimizer_states()]

    def get_optimizer_buffer(self, state: str) -> Tensor:
        """The buffer of that name: iter, momentum1_dev, ...

        Raises:
            NotImplementedError: there is no optimizer.
            ValueError: there is no such buffer.
        """
        self._require_fused("get_optimizer_buffer")
        buffers = dict(self.named_buffers())
        if state not in buffers:
            raise ValueError(f"no buffer is called {state!r}: {', '.join(buffers)} are")
        return buffers[state]

    def set_learning_rate(self, lr: float | Tensor) -> None:
        """Change the learning rate from the next update on.

        Raises:
            NotImplementedError: there is no optimizer.
            ValueError: it is negative or not finite.
        """
        self.update_hyper_parameters({"lr": float(lr)})

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self._group.lr

    @property
    def learning_rate_tensor(self) -> Tensor:
        """The learning rate as a tensor; `set_learning_rate` changes it, not what is written here."""
        return torch.tensor(self._group.lr, dtype=torch.float32, device="cpu")

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Change lr, eps, beta1, beta2 or weight_decay from the next update on; what a rule does not have is ignored.

        Raises:
            NotImplementedError: there is no optimizer.
            ValueError: another name, or a number that is negative or not finite; nothing changed.
        """
        self._require_fused("update_hyper_parameters")
        numbers = {name: float(value) for name, value in params_dict.items()}
        if unknown := sorted(set(numbers) - {"lr", "eps", "beta1", "beta2", "weight_decay"}):
            raise ValueError(f"hyper-parameters {unknown} are not served: lr, eps, beta1, beta2 and weight_decay are")
        group, rate = self._group, numbers.pop("lr", self._group.lr)
        args = self.optimizer_args._replace(**numbers)  # type: ignore[arg-type]
        spec = fused_spec(self.optimizer, rate, args, who=self._who)
        self.optimizer_args, group.optimizer, group.lr = args, spec, rate
        # in place: a captured graph reads it
        group.hyper.copy_(spec.hyper(group.device))

    def set_optimizer_step(self, step: int) -> None:
        """Go on counting updates from `step`, which Adam and LAMB correct by.

        Raises:
            NotImplementedError: there is no optimizer.
        """
        self._require_fused("set_optimizer_step")
        self._take_back()
        self._group.step.fill_(step)

    @torch.no_grad()
    def reset_embedding_weight_momentum(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Have pruned rows begin anew, as zeros with states of zeros; of rowwise Adagrad only.

        With other optimizers nothing happens, as in FBGEMM. Waits for the device.

        Args:
            pruned_indices: [N] rows, list after list.
            pruned_indices_offsets: [lists + 1] where each list begins.
            logical_table_ids, buffer_ids: [n] features, and which list each of them has.

        Raises:
            NotImplementedError: there is no optimizer.
        """
        self._require_fused("reset_embedding_weight_momentum")
        if self.optimizer not in (OptimType.EXACT_ROWWISE_ADAGRAD, OptimType.ROWWISE_ADAGRAD):
            return
        self._take_back()
        rows, starts = pruned_indices.to(self._group.device), pruned_indices_offsets.tolist()
        for feature, number in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            gone = rows[starts[number] : starts[number + 1]]
            table = self.feature_table_map[feature]
            self._group.renew(table, gone, self._group.flat.new_zeros(len(gone), self.dims[table]))

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: torch.cuda.Stream | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """Nothing: all rows are on the device."""

    def flush(self) -> None:
        """Nothing: no row waits in a cache."""

    def reset_cache_states(self) -> None:
        """Nothing: there is no cache."""

    def _require_fused(self, asked: str) -> None:
        if self.optimizer is OptimType.NONE:
            raise NotImplementedError(f"{asked}: OptimType.NONE has no optimizer in the backward")


class _Reached(torch.autograd.Function):
    """A number that depends on parameters, and gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(parameters)
        return parameters[0].new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        count: int = ctx.count
        return (None,) * count


def _device(device: str | int | torch.device | None, use_cpu: bool) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cpu") if use_cpu else torch.device("cuda", torch.cuda.current_device())
