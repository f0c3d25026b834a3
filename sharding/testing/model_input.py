"""Random batches of a small model: one of all ranks together, and each rank's part of it, by TorchRec's name.

With one seed the numbers are TorchRec's. Shapes, of B samples a rank and W ranks: float_features
[B, num_float_features] and label [B], in [0, 1); idlist_features and, with weights, idscore_features are bags of B
samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.embeddings import BaseEmbeddingConfig
from shardwise.jagged import KeyedJaggedTensor, Pipelineable

Tables: TypeAlias = Sequence[BaseEmbeddingConfig]

# full batches of features with batch sizes of their own are this many times as long as these on average
_DEDUP_FACTOR = 2
# lengths of such features are below it
_LENGTHS_BELOW = 5
# an exponent this near to 1 is 1
_NEAR_ONE = 2e-3


@dataclass
class ModelInput(Pipelineable):
    """A batch: dense features, features of tables, features of weighted tables (or None), labels."""

    float_features: Tensor
    idlist_features: KeyedJaggedTensor
    idscore_features: KeyedJaggedTensor | None
    label: Tensor

    @staticmethod
    def generate(
        batch_size: int,
        world_size: int,
        num_float_features: int,
        tables: Tables,
        weighted_tables: Tables,
        pooling_avg: int = 10,
        dedup_tables: Tables | None = None,
        variable_batch_size: bool = False,
        tables_pooling: Sequence[int] | None = None,
        weighted_tables_pooling: Sequence[int] | None = None,
        randomize_indices: bool = True,
        device: torch.device | None = None,
        max_feature_lengths: Sequence[int] | None = None,
        input_type: str = "kjt",
        use_offsets: bool = False,
        indices_dtype: torch.dtype = torch.int64,
        offsets_dtype: torch.dtype = torch.int64,
        lengths_dtype: torch.dtype = torch.int64,
        random_seed: int | None = None,
        power_law_alpha: float | None = None,
    ) -> tuple[ModelInput, list[ModelInput]]:
        """A batch of W * B samples, and of each rank its B samples of it.

        Bags have about `pooling_avg` ids, or what `tables_pooling` and `weighted_tables_pooling` have for the table; at
        most what `max_feature_lengths` has for the feature (0: any number). Ids are drawn evenly, or by a power law of
        exponent `power_law_alpha`, or all 0 without `randomize_indices`. With `variable_batch_size` rank r has bags for
        max(B - r, 1) samples alone. `use_offsets` builds the features of offsets in place of lengths. `dedup_tables`
        has no effect, as in TorchRec.

        Raises:
            ValueError: `input_type` is not "kjt", or pooling factors are not as many as tables.
        """
        if input_type != "kjt":
            raise ValueError(
                f"input_type must be 'kjt', got {input_type!r}: of a TensorDict, torchrec.sparse.tensor_dict makes one"
            )
        for own, factors in ((tables, tables_pooling), (weighted_tables, weighted_tables_pooling)):
            if factors and len(factors) != len(own):
                raise ValueError(
                    f"tables_pooling and tables must have the same length. Got {len(factors)} and {len(own)}."
                )
        if random_seed is not None:
            torch.manual_seed(random_seed)
        samples = [max(batch_size - rank, 1) if variable_batch_size else batch_size for rank in range(world_size)]
        draw = _Draw(batch_size, samples, randomize_indices, power_law_alpha, indices_dtype, lengths_dtype, device)

        rows, factor_of, most_of = {}, {}, {}
        for number, (key, table) in enumerate(_keys(tables)):
            rows[key] = _rows_of(tables[table])
            most_of[key] = max_feature_lengths[number] if max_feature_lengths else None
            factor_of[key] = None if tables_pooling is None else tables_pooling[table]
        plain = [draw.feature(rows[key], pooling_avg, factor_of[key], most_of[key]) for key in rows]
        scored, scored_keys = [], []
        for key, table in _keys(weighted_tables):
            mean = weighted_tables_pooling[table] if weighted_tables_pooling else pooling_avg
            scored_keys.append(key)
            scored.append(draw.feature(_rows_of(weighted_tables[table]), mean, weighted=True))

        shape = (batch_size * world_size, num_float_features)
        new: Callable[..., Tensor] = torch.rand if randomize_indices else torch.zeros
        dense, label = new(shape, device=device), new(shape[:1], device=device)

        def assembled(keys: list[str], parts: list[_Bags]) -> KeyedJaggedTensor | None:
            return _kjt(keys, parts, offsets_dtype if use_offsets else None) if parts else None

        def batch(of_part: Callable[[_Bags], _Bags], span: slice) -> ModelInput:
            features = assembled(list(rows), list(map(of_part, plain)))
            return ModelInput(
                dense[span],
                KeyedJaggedTensor([], torch.empty(0, dtype=indices_dtype)) if features is None else features,
                assembled(scored_keys, list(map(of_part, scored))),
                label[span],
            )

        return batch(lambda bags: bags, slice(None)), [
            batch(
                lambda bags, rank=rank: bags.of_rank(rank, batch_size, samples[rank]),  # type: ignore[misc]
                slice(rank * batch_size, (rank + 1) * batch_size),
            )
            for rank in range(world_size)
        ]

    @staticmethod
    def generate_variable_batch_input(
        average_batch_size: int,
        world_size: int,
        num_float_features: int,
        tables: Tables,
        weighted_tables: Tables | None = None,
        pooling_avg: int = 10,
        global_constant_batch: bool = False,
        use_offsets: bool = False,
        indices_dtype: torch.dtype = torch.int64,
        offsets_dtype: torch.dtype = torch.int64,
        lengths_dtype: torch.dtype = torch.int64,
        random_seed: int | None = None,
    ) -> tuple[ModelInput, list[ModelInput]]:
        """A batch whose features have batch sizes of their own and inverse indices, and each rank's part of it.

        The full batch of a rank has 2 * average_batch_size samples. With `global_constant_batch` the batch of all ranks
        is full in every feature, as an unsharded model takes it. The seed is 100 unless given. `pooling_avg` has no
        effect, as in TorchRec: bags hold up to 4 ids.
        """
        seed = 100 if random_seed is None else random_seed
        torch.manual_seed(seed)
        random.seed(seed)
        full = _DEDUP_FACTOR * average_batch_size
        offsets = offsets_dtype if use_offsets else None

        def features(own: Tables) -> tuple[KeyedJaggedTensor, list[KeyedJaggedTensor]]:
            weighted = bool(own and getattr(own[0], "is_weighted", False))
            rows = {key: _rows_of(own[table]) for key, table in _keys(own)}
            keys = list(rows)
            drawn = [
                {key: _drawn_bags(rows[key], full, weighted, indices_dtype, lengths_dtype) for key in keys}
                for _ in range(world_size)
            ]
            local = [_own_sizes(keys, [[rank[key]] for key in keys], offsets) for rank in drawn]
            of_key = [[rank[key] for rank in drawn] for key in keys]
            if not global_constant_batch:
                return _own_sizes(keys, of_key, offsets), local
            return _kjt(keys, [_joined([part.expanded() for part in parts]) for parts in of_key], offsets), local

        plain, plain_local = features(tables)
        scored, scored_local = features(weighted_tables) if weighted_tables else (None, [None] * world_size)
        dense = torch.rand(full * world_size, num_float_features)
        labels = [torch.rand(full) for _ in range(world_size)]
        local = [
            ModelInput(dense[rank * full : (rank + 1) * full], plain_local[rank], scored_local[rank], labels[rank])
            for rank in range(world_size)
        ]
        return ModelInput(dense, plain, scored, torch.cat(labels)), local

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: torch.Stream | None = None
    ) -> ModelInput:
        """The batch on `device`; with a stream, copied on it once what is queued now has run."""
        if data_copy_stream is not None:
            module = torch.get_device_module(device)
            data_copy_stream.wait_stream(module.current_stream(device))
            with module.stream(data_copy_stream):
                return self.to(device, non_blocking)
        scored = self.idscore_features
        return ModelInput(
            self.float_features.to(device, non_blocking=non_blocking),
            self.idlist_features.to(device, non_blocking=non_blocking),
            None if scored is None else scored.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory of the batch until the work queued on `stream` is done."""
        for each in (self.float_features, self.idlist_features, self.idscore_features, self.label):
            if each is not None:
                each.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            each.element_size() * each.numel() if isinstance(each, Tensor) else each.size_in_bytes()
            for each in (self.float_features, self.idlist_features, self.idscore_features, self.label)
            if each is not None
        )


@dataclass(frozen=True)
class _Bags:
    """Bags of one feature; `inverse` says which of them each sample of a full batch has."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None = None
    inverse: Tensor | None = None

    def of_rank(self, rank: int, batch_size: int, samples: int) -> _Bags:
        """The bags of a rank: `samples` of the `batch_size` places that it has."""
        first = rank * batch_size
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[: first + batch_size].sum())
        weights = None if self.weights is None else self.weights[begin:end]
        return _Bags(self.lengths[first : first + samples], self.values[begin:end], weights)

    def expanded(self) -> _Bags:
        """The bags of the full batch."""
        assert self.inverse is not None
        chosen = self.inverse.tolist()
        sizes = self.lengths.tolist()
        values = torch.split(self.values, sizes)
        weights = None if self.weights is None else torch.split(self.weights, sizes)
        return _Bags(
            self.lengths[self.inverse.long()],
            torch.cat([self.values[:0], *(values[bag] for bag in chosen)]),
            None if weights is None else torch.cat([weights[bag] for bag in chosen]),
        )


@dataclass(frozen=True)
class _Draw:
    """How `generate` draws the bags of a feature, for all ranks."""

    batch_size: int
    samples: list[int]
    randomize: bool
    alpha: float | None
    indices_dtype: torch.dtype
    lengths_dtype: torch.dtype
    device: torch.device | None

    def feature(
        self, rows: int, mean: int, factor: int | None = None, most: int | None = None, weighted: bool = False
    ) -> _Bags:
        """Bags of about `mean` ids, or of `factor` where that is given, by another law."""
        count = self.batch_size * len(self.samples)
        if factor is None:
            lengths = (torch.randn(count, device=self.device) + mean).abs().to(self.lengths_dtype)
        else:
            spread = torch.normal(float(factor), factor / 10, [count], device=self.device)
            lengths = spread.clamp(min=1.0).to(self.lengths_dtype)
        if most:
            lengths = lengths.clamp(max=most)
        place = torch.arange(count, device=self.device) % self.batch_size
        held = torch.tensor(self.samples, device=self.device).repeat_interleave(self.batch_size)
        lengths = lengths * (place < held)
        # a test's batch is made on the host, where its size is needed
        ids = self._ids(rows, int(lengths.sum()))
        return _Bags(lengths, ids, torch.rand(len(ids), device=self.device) if weighted else None)

    def _ids(self, rows: int, count: int) -> Tensor:
        if not self.randomize:
            return torch.zeros(count, dtype=self.indices_dtype, device=self.device)
        if self.alpha is None:
            return torch.randint(0, rows, (count,), dtype=self.indices_dtype, device=self.device)
        return power_law_ids(self.alpha, count, rows, self.indices_dtype, self.device)


def power_law_ids(alpha: float, count: int, rows: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """`count` ids in [0, rows), id x as often as a density of 1 / (x + 1)^alpha has it; evenly for an `alpha` of 0.

    Raises:
        ValueError: `alpha` is negative, or there are no rows.
    """
    if alpha < 0:
        raise ValueError(f"alpha must be >= 0, got {alpha}")
    if rows < 1:
        raise ValueError(f"num_embeddings must be >= 1, got {rows}")
    if rows == 1:
        return torch.zeros(count, dtype=dtype, device=device)
    if alpha == 0:
        return torch.randint(0, rows, (count,), dtype=dtype, device=device)

    def drawn(count: int) -> Tensor:
        # the density's distribution function, inverted; the ends would be infinite
        u = torch.rand(count, device=device).clamp(1e-10, 1 - 1e-10)
        if abs(alpha - 1) < _NEAR_ONE:
            return (torch.pow(float(rows), u) - 1).long()
        if alpha < 1:
            return (torch.pow(u * (rows ** (1 - alpha) - 1) + 1, 1 / (1 - alpha)) - 1).long()
        return (torch.pow(1 - u, -1 / (alpha - 1)) - 1).long()

    ids = drawn(count)
    if alpha > 1:
        # the tail beyond the table is drawn again
        while (beyond := ids >= rows).any():
            ids[beyond] = drawn(int(beyond.sum()))
    return ids.clamp(0, rows - 1).to(dtype)


def _drawn_bags(rows: int, full: int, weighted: bool, indices_dtype: torch.dtype, lengths_dtype: torch.dtype) -> _Bags:
    """Bags of one feature and rank, fewer than the full batch has, and which one each of its samples has."""
    count = random.randint(1, full - 1)
    lengths = torch.randint(0, _LENGTHS_BELOW, (count,), dtype=lengths_dtype)
    ids = torch.randint(0, rows, (int(lengths.sum()),), dtype=indices_dtype)
    weights = torch.rand(len(ids)) if weighted else None
    return _Bags(lengths, ids, weights, torch.randint(0, count, (full,), dtype=indices_dtype))


def _joined(parts: Sequence[_Bags]) -> _Bags:
    weights = [part.weights for part in parts if part.weights is not None]
    return _Bags(
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat(weights) if weights else None,
    )


def _kjt(keys: list[str], parts: Sequence[_Bags], offsets_dtype: torch.dtype | None, **more: Any) -> KeyedJaggedTensor:
    """The features of a batch, each bags of its own; by offsets where these have a type."""
    whole = _joined(parts)
    if offsets_dtype is None:
        return KeyedJaggedTensor(keys, whole.values, weights=whole.weights, lengths=whole.lengths, **more)
    offsets = torch.nn.functional.pad(whole.lengths.cumsum(0), (1, 0)).to(offsets_dtype)
    return KeyedJaggedTensor(keys, whole.values, weights=whole.weights, offsets=offsets, **more)


def _own_sizes(keys: list[str], parts: list[list[_Bags]], offsets_dtype: torch.dtype | None) -> KeyedJaggedTensor:
    """The features of a batch with a size for each; of a key the parts of its ranks."""
    inverse = []
    for ranks in parts:
        first, rows = 0, []
        for part in ranks:
            assert part.inverse is not None
            rows.append(part.inverse + first)
            first += len(part.lengths)
        inverse.append(torch.cat(rows))
    return _kjt(
        keys,
        [_joined(ranks) for ranks in parts],
        offsets_dtype,
        stride_per_key_per_rank=[[sum(len(part.lengths) for part in ranks)] for ranks in parts],
        inverse_indices=(keys, torch.stack(inverse)),
    )


def _keys(tables: Tables) -> list[tuple[str, int]]:
    """Features and the number of their table."""
    return [(key, number) for number, table in enumerate(tables) for key in table.feature_names]


def _rows_of(table: BaseEmbeddingConfig) -> int:
    return table.num_embeddings if table.num_embeddings_post_pruning is None else table.num_embeddings_post_pruning
