"""What a sharded quantized model is made of, by TorchRec's names: its lookups, their tables, and which part of a table
each of its buffers is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.embeddings import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embeddings.quant import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
    EmbeddingCollection as QuantEmbeddingCollection,
    QuantizedTables,
)

from .collection import ShardedQuantizedCollection
from .modules import ShardedQuantEmbeddingBagCollection, ShardedQuantEmbeddingCollection

_SPARSE_TYPES = {"fp8": "NFP8"}
_COLLECTIONS: tuple[type[nn.Module], ...] = (
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingCollection,
)


@dataclass
class WeightSpec:
    """What a buffer of a sharded model is: a part of the tensor `fqn` of the unsharded quantized model's state dict.

    The part is [row, column] `shard_offsets` and as large as `shard_sizes`, in that tensor's own columns: bytes of
    payload, one of `weight_qscale`.
    """

    fqn: str
    shard_offsets: list[int]
    shard_sizes: list[int]
    sharding_type: str | None
    virtual_table_dim_offsets: list[int] | None = None


def populate_fx_names(quant_ebc: nn.Module) -> None:
    """Paths for what `torch.fx` meets in a quantized bag collection, sharded or not: always so, nothing changes.

    TorchRec's lookups are outside of the module tree, where a trace finds no path to them. A collection of ours is one
    node of a trace, by its own path.

    Raises:
        TypeError: it is no quantized bag collection.
    """
    if not isinstance(quant_ebc, QuantEmbeddingBagCollection | ShardedQuantEmbeddingBagCollection):
        raise TypeError(f"a quantized EmbeddingBagCollection has its lookups named, got {type(quant_ebc).__name__}")


def recursive_populate_fx_names(module: nn.Module) -> None:
    """`populate_fx_names` of all quantized bag collections in a module; nothing changes.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a module is looked through, got {type(module).__name__}")


def sharded_tbes_weights_spec(
    sharded_model: nn.Module, virtual_table_name_to_bucket_lengths: Mapping[str, list[int]] | None = None
) -> dict[str, WeightSpec]:
    """What each buffer of the sharded quantized tables of a model is, by the buffer's name in the model.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> quantized = quantize_inference_model(torch.nn.Sequential(tables))
        >>> sharded, _ = shard_quant_model(quantized, world_size=2, compute_device="cpu", sharding_device="cpu")
        >>> specs = sharded_tbes_weights_spec(sharded)
        >>> [spec.shard_sizes for spec in specs.values() if spec.fqn == "0.embedding_bags.item.weight"]
        [[10, 4]]

    Raises:
        ValueError: bucket lengths of virtual tables are given, of which there are none.
    """
    if virtual_table_name_to_bucket_lengths:
        raise ValueError(f"there are no virtual tables, got {sorted(virtual_table_name_to_bucket_lengths)}")
    found = {}
    for path, module in sharded_model.named_modules():
        if not isinstance(module, ShardedQuantizedCollection):
            continue
        below = f"{path}." if path else ""
        for name, part in module.buffers_of_shards().items():
            if part.name == "index_remapping":
                continue
            (top, bottom), (left, right) = part.rows, part.cols
            fqn = f"{below}{module._children_name}.{part.table}.{part.name}"
            found[below + name] = WeightSpec(fqn, [top, left], [bottom - top, right - left], part.sharding_type)
    return found


def get_tbes_from_sharded_module(module: nn.Module) -> list[QuantizedTables]:
    """The lookups of a sharded quantized collection: pieces of tables of one format on one device each.

    Raises:
        TypeError: it is no such collection.
    """
    return [part.held for part in _require(module)._tables.parts]


def get_tbe_specs_from_sharded_module(module: nn.Module) -> list[tuple[str, int, int, str, str]]:
    """Of each piece: table, rows, columns, format and kind of memory, the last two in FBGEMM's words.

    Raises:
        TypeError: it is no sharded quantized collection.
    """
    found = []
    for part in _require(module)._tables.parts:
        where = "HOST" if part.device.type == "cpu" else "DEVICE"
        for table in part.held.tables:
            kind = _SPARSE_TYPES.get(table.format, table.format.upper())
            found.append((table.name, table.rows, table.dim, f"SparseType.{kind}", f"EmbeddingLocation.{where}"))
    return found


def get_path_device_tuples(module: nn.Module, ignore_list: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Path and device of what a module is made of: modules that say where they are, pieces, other tensors.

    `ignore_list` has names that a path may not contain.
    """
    found: list[tuple[str, str]] = []
    for path, one in module.named_modules():
        below = f"{path}." if path else ""
        if isinstance(one, ShardedQuantizedCollection):
            found.append((f"{below}device", str(one.device)))
        tensors = [*one.named_parameters(recurse=False), *one.named_buffers(recurse=False)]
        found += [(f"{below}{name}.device", str(tensor.device)) for name, tensor in tensors]
    ignored = set(ignore_list or ())
    return [(path, device) for path, device in found if not ignored & set(path.split("."))]


def get_all_torchrec_modules(
    model: nn.Module, trec_module_class_types: Sequence[type[nn.Module]] | None = None
) -> dict[str, nn.Module]:
    """The outermost modules of these exact classes by path; by default collections, quantized and sharded ones too."""
    kinds = tuple(trec_module_class_types or _COLLECTIONS)
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        if type(module) in kinds:
            found[path] = module
            return
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found


def get_non_scriptable_trec_module(model: nn.Module) -> dict[str, nn.Module]:
    """The sharded quantized collections of a model by path."""
    return get_all_torchrec_modules(model, _COLLECTIONS[:2])


def _require(module: nn.Module) -> ShardedQuantizedCollection:
    if not isinstance(module, ShardedQuantizedCollection):
        raise TypeError(f"expected a sharded quantized collection, got {type(module).__name__}")
    return module
