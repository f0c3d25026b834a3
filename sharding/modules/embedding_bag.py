"""`torch.nn.EmbeddingBag` over several ranks: one table on the engine of the collections."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, LookupPolicy, PoolingType
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged.tracing import holds_proxy, record_forward

from ...planner.layout import Shard, TableOptions
from ..comms.awaitable import Awaitable, LazyAwaitable
from ..comms.env import ShardingEnv
from ..engine.fused_optimizer import ShardedFusedOptimizer
from ..engine.stages import StepContext
from ..engine.step import Step
from ..engine.tables import Mark
from ..plan.module_sharder import require_tables, require_type
from ..plan.plan import ParameterSharding, shards_of
from .sharded_collections import ShardedEmbeddingBagCollection, StepAwaitable
from .sharders import CollectionSharder

# the table's name in a plan, and that of its parameter
_WEIGHT = "weight"
_FEATURE = "input"
_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
# arguments of nn.EmbeddingBag that change what it answers or how it trains, and their defaults
_NOT_SERVED = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}


class EmbeddingBagAwaitable(StepAwaitable[Tensor]):
    """The sums of a batch's bags that are on their way."""

    awaited_type = Tensor

    def _wait_impl(self) -> Tensor:
        sums: Tensor = self._collection.finish(self._step).values()
        return sums


class ShardedEmbeddingBag(ShardedEmbeddingBagCollection):
    """A `torch.nn.EmbeddingBag` over several ranks: same inputs, same output, same parameter name, `weight`.

    Its table trains in the backward, by the optimizer applied to `weight`, unless it is replicated and has none.

    Raises:
        ValueError: `mode` is "max", or `padding_idx`, `max_norm` or `scale_grad_by_freq` are set.
    """

    _awaitable = EmbeddingBagAwaitable
    _unsharded_type = nn.EmbeddingBag
    weight: nn.Parameter

    def __init__(
        self,
        module: nn.EmbeddingBag,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        *,
        default_optimizer: Mark,
        options: dict[str, TableOptions] | None = None,
        codecs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            _collection_of(module),
            shards,
            env,
            device,
            default_optimizer=default_optimizer,
            options=options,
            codecs=codecs,
        )
        self.mode, self.include_last_offset = module.mode, module.include_last_offset
        # under its own name, in the place of the collection's
        del self._modules[self._children_name]
        self.register_parameter(_WEIGHT, self.parameter(_WEIGHT))
        self.fused_optimizer = _WeightOptimizer(self.shards, self.states, "")

    def parameter_name(self, table: str) -> str:
        """ "weight"."""
        return _WEIGHT

    def forward(  # type: ignore[override]
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> LazyAwaitable[Tensor]:
        """Look this rank's bags up, together with the other ranks.

        Shapes: input [N] with offsets [B], or [B + 1] with `include_last_offset`; or input [B, n], bags of n ids,
        without offsets. per_sample_weights as input, for `mode` "sum" alone. The result is [B, D].

        Raises:
            ValueError, TypeError, IndexError: inputs do not fit together, or an id is outside the table; on all ranks.
        """
        if holds_proxy((input, offsets, per_sample_weights)):
            return record_forward(ShardedEmbeddingBag.forward, self, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
        return super().forward(self._features(input, offsets, per_sample_weights))  # type: ignore[return-value]

    def result_of(self, outputs: list[Tensor]) -> Tensor:
        """The sums."""
        return outputs[0]

    @staticmethod
    def extend_shard_name(shard_name: str) -> str:
        """ "weight", of which there is one."""
        return _WEIGHT

    def input_dist(
        self,
        ctx: StepContext,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Awaitable[Awaitable[Step]]:
        """Send the bags' sizes, then their ids; arguments as `forward`, and the first wait raises as it does."""
        return super().input_dist(ctx, self._features(input, offsets, per_sample_weights))

    def _features(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor | Exception:
        try:
            return self._batch(input, offsets, weights)
        except Exception as error:
            # in the place of the batch, so that no rank waits for this one
            return error

    def _batch(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor:
        if weights is not None and not self._weighted:
            raise ValueError(f"per_sample_weights are for mode 'sum', this is mode {self.mode!r}")
        if weights is not None and weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights must have the input's shape {list(input.shape)}, got {list(weights.shape)}"
            )
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("an input of two dimensions has a bag in each row: leave offsets None")
            bags, size = input.shape
            offsets = torch.arange(0, (bags + 1) * size, size, device=input.device) if size else None
            if offsets is None:
                offsets = torch.zeros(bags + 1, dtype=torch.int64, device=input.device)
        elif input.dim() == 1:
            if offsets is None or offsets.dim() != 1:
                raise ValueError("an input of one dimension needs offsets, of one dimension too")
            if self.include_last_offset and not offsets.shape[0]:
                raise ValueError("include_last_offset: offsets must have at least one entry")
            if not self.include_last_offset:
                offsets = torch.cat([offsets, offsets.new_full((1,), input.shape[0])])
        else:
            raise ValueError(f"input must have one or two dimensions, got {input.dim()}")
        if self._weighted and weights is None:
            weights = torch.ones(input.shape, device=input.device)
        flat = None if weights is None else weights.reshape(-1)
        return KeyedJaggedTensor([_FEATURE], input.reshape(-1), flat, offsets=offsets)


class _WeightOptimizer(ShardedFusedOptimizer):
    """The table's optimizer, under the parameter's name."""

    def _name(self, table: str) -> str:
        return _WEIGHT


class EmbeddingBagSharder(CollectionSharder[nn.EmbeddingBag]):
    """The sharder of `torch.nn.EmbeddingBag`; its table is "weight" in plans. Not among the default sharders.

    Args:
        fused_params, qcomm_codecs_registry: as `BaseEmbeddingSharder`.
    """

    _sharded_type = ShardedEmbeddingBag

    @property
    def module_type(self) -> type[nn.EmbeddingBag]:
        """`torch.nn.EmbeddingBag`."""
        return nn.EmbeddingBag

    def shardable_parameters(self, module: nn.EmbeddingBag) -> dict[str, nn.Parameter]:
        """The table."""
        return dict(module.named_parameters())

    def shard(
        self,
        module: nn.EmbeddingBag,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBag:
        """The sharded form; all ranks call this together. `device` is the CPU unless given.

        Raises:
            TypeError: the module is no `torch.nn.EmbeddingBag`.
            ValueError: the plan does not fit the module, or the module asks for what is not served.
        """
        require_type(self, module)
        require_tables(params, [_WEIGHT], module_fqn)
        where = torch.device(device or "cpu")
        self._settings.require_device(where)
        shards = shards_of(_WEIGHT, params[_WEIGHT], module.num_embeddings, module.embedding_dim, env.world_size)
        options = {_WEIGHT: self._options_of(_WEIGHT, params[_WEIGHT], module.weight)}
        options = self._fitted(params, shards, options, {_WEIGHT: module.weight}, where)
        sharded = ShardedEmbeddingBag(
            module, shards, env, where, default_optimizer=self._default_optimizer, options=options,
            codecs=self.qcomm_codecs_registry,
        )  # fmt: skip
        return sharded.named_in_model(module_fqn)


def _collection_of(module: nn.EmbeddingBag) -> EmbeddingBagCollection:
    """A collection that holds the module's parameter."""
    if module.mode not in _POOLINGS:
        raise ValueError(
            f"mode {module.mode!r} is not served for a sharded EmbeddingBag; these are: {', '.join(_POOLINGS)}"
        )
    for what, default in _NOT_SERVED.items():
        if getattr(module, what) != default:
            raise ValueError(
                f"{what}={getattr(module, what)!r} is not served for a sharded EmbeddingBag: leave it {default}"
            )
    if module.sparse:
        warnings.warn("sparse=True has no effect: a sharded EmbeddingBag trains in its backward", stacklevel=5)
    dtype = module.weight.dtype
    # a table on meta is initialised as nn.EmbeddingBag does it
    table = EmbeddingBagConfig(
        module.num_embeddings, module.embedding_dim, _WEIGHT, feature_names=[_FEATURE],
        pooling=_POOLINGS[module.mode], init_fn=nn.init.normal_,
    )  # fmt: skip
    # sums may come with weights, so all of them do: a batch without gets ones
    weighted, policy = module.mode == "sum", LookupPolicy(output_dtype=dtype)
    collection = EmbeddingBagCollection([table], weighted, "meta", policy=policy)
    collection.embedding_bags[_WEIGHT].register_parameter("weight", dict(module.named_parameters())["weight"])
    return collection.train(module.training)
