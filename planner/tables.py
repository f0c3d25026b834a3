"""Tables as the planner knows them, and the batches that look them up. Plain data.

Lengths are means: a sample of feature f brings `pooling_factor` ids a lookup and `num_poolings` lookups. A
`batch_size` is that of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.embeddings.config import DataType

# bytes of an element of a table
ELEMENT_BYTES = {
    DataType.FP32: 4.0, DataType.FP16: 2.0, DataType.BF16: 2.0, DataType.INT8: 1.0, DataType.UINT8: 1.0,
    DataType.NFP8: 1.0, DataType.INT4: 0.5, DataType.INT2: 0.25,
}  # fmt: skip
# bytes of the scale, and bias, of a quantized row
SCALE_BYTES = {DataType.INT8: 4, DataType.UINT8: 4, DataType.INT4: 4, DataType.INT2: 4, DataType.NFP8: 4}


@dataclass(frozen=True)
class Feature:
    """How one feature looks a table up; `batch_size` of one rank, None that of the whole model.

    Raises:
        ValueError: a number is negative.
    """

    name: str
    pooling_factor: float = 1.0
    num_poolings: float = 1.0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for what in ("pooling_factor", "num_poolings"):
            if not getattr(self, what) >= 0:
                raise ValueError(f"feature {self.name!r}: {what} must be 0 or more, got {getattr(self, what)}")


@dataclass(frozen=True)
class Skew:
    """How unevenly ids are drawn: the k-th most frequent id with a probability proportional to (k + shift)^-alpha.

    alpha 0 is uniform. `sorted_ids`: frequent ids have small numbers, as where a vocabulary was counted first, so that
    the first row shard gets most lookups; otherwise ids are spread, as where they were hashed.
    """

    alpha: float = 0.0
    shift: float = 0.0
    sorted_ids: bool = False


@dataclass(frozen=True)
class Table:
    """A table to place.

    Args:
        name: as in the module's config.
        num_embeddings, embedding_dim: rows and columns.
        data_type: of the rows.
        features: those that look it up.
        pooled: bags are pooled (a bag collection) or every id gets its row (a sequence collection).
        weighted: ids have weights.
        optimizer: the class name of the optimizer in its backward, "SGD" or "RowWiseAdagrad" say; None without one.
        module: path of its module in the model.
        skew: how its ids are drawn.
        served: it is quantized and only looked up, by one process that has the whole batch and all devices.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    data_type: DataType = DataType.FP32
    features: tuple[Feature, ...] = ()
    pooled: bool = True
    weighted: bool = False
    optimizer: str | None = None
    module: str = ""
    skew: Skew = Skew()
    served: bool = False

    @property
    def element_bytes(self) -> float:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.data_type]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row beside its elements."""
        return SCALE_BYTES.get(self.data_type, 0) if self.served else 0

    @property
    def path(self) -> str:
        """Module path and name, unique in a model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def ids(self, batch_size: int) -> float:
        """Ids that one rank's batch brings, on average."""
        return sum(f.pooling_factor * f.num_poolings * (f.batch_size or batch_size) for f in self.features)

    def bags(self, batch_size: int) -> float:
        """Bags of one rank's batch."""
        return sum(f.num_poolings * (f.batch_size or batch_size) for f in self.features)


# optimizer class -> states of an element, and of a row: fp32 numbers (`kernels/update/rules.py`)
STATES: dict[str, tuple[int, int]] = {
    "SGD": (0, 0), "RowWiseAdagrad": (0, 1), "Adagrad": (1, 0), "Adam": (2, 0), "AdamW": (2, 0), "SparseAdam": (2, 0),
    "LAMB": (2, 0), "LarsSGD": (1, 0), "PartialRowWiseAdam": (1, 1), "PartialRowWiseLAMB": (1, 1), "FTRL": (2, 0),
}  # fmt: skip
# one whose rule is not known
_UNKNOWN = (2, 0)


def state_bytes(optimizer: str | None, width: int) -> int:
    """Bytes of the optimizer's state of one row of `width` columns; a table without one trains by SGD."""
    of_element, of_row = STATES.get(optimizer or "SGD", _UNKNOWN)
    return 4 * (of_element * width + of_row)
