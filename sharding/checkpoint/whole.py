"""A model as plain whole tensors, by the names of its unsharded form: out of a checkpoint, or from its ranks."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from shardwise.embeddings.tiers import chunks_of, parts_of
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.engine.fully_sharded import whole_tables
from shardwise.sharding.engine.state import part_of

from .contents import HeldTable, Home, contents_of, link_of
from .errors import agree
from .files import TensorFiles, check_checksum, row_blocks
from .loading import box_of, within
from .manifest import OPTIMIZER, WEIGHT, read_manifest
from .places import locate
from .storage import Files, files_in


def full_state_dict(model_or_path: nn.Module | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights [R, D], other parameters and buffers as whole tensors on the CPU, by the names of the unsharded model.

    They load into it by `load_state_dict`, and a table's rows into an `nn.EmbeddingBag`. Of a model all ranks call this
    together, and each gets all of it; of a step folder any process alone, without torch.distributed.

    Raises:
        CheckpointDamaged, FileNotFoundError: as `load`.
    """
    if isinstance(model_or_path, nn.Module):
        return _of_model(model_or_path)
    return _of_files(files_in(locate(model_or_path)))


def _of_model(model: nn.Module) -> dict[str, Tensor]:
    link = link_of(model)
    contents = agree(link, lambda: (contents_of(model, None, link), 0))
    with whole_tables(model):
        tensors = {name: _gathered(table) for name, table in contents.tables.items()}
    tensors.update({name: tensor.detach().to("cpu", copy=True) for name, tensor in contents.dense.items()})
    return {**tensors, **{name: tensors[original] for name, original in contents.aliases.items()}}


@torch.no_grad()
def _gathered(table: HeldTable) -> Tensor:
    """A table's rows, from the ranks that hold them, a block at a time."""
    whole = torch.empty(table.rows, table.dim, dtype=table.dtype, device="cpu")  # [rows, dim]
    homes = {home.shard: home for home in table.homes}
    exchange = Exchange(table.group)
    for shard in table.shards:
        width = shard.cols[1] - shard.cols[0]
        if shard.replica and shard.rank != exchange.rank:
            continue
        place = part_of(whole, ((0, table.rows), (0, table.dim)), (shard.rows, shard.cols))
        for low, high in row_blocks((0, shard.rows[1] - shard.rows[0]), width * table.dtype.itemsize):
            block = _rows_of(homes[shard], low, high) if shard in homes else None
            if shard.replica or exchange.alone:
                assert block is not None
                place[low:high] = block.cpu()
                continue
            # the owner sends it to all, itself too
            size, world = (high - low) * width, exchange.world_size
            send = (
                torch.empty(0, dtype=table.dtype, device=table.device)
                if block is None
                else block.reshape(-1).to(table.device).repeat(world)
            )
            sizes = [size if rank == shard.rank else 0 for rank in range(world)]
            came = exchange.numbers(send, [0 if block is None else size] * world, sizes).wait()
            # numbers [(high - low) * width] from the owner, none from the others
            place[low:high] = came.cpu().view(high - low, width)
    return whole


def _rows_of(home: Home, low: int, high: int) -> Tensor:
    """Rows [low, high) of a shard; of a table with a tier on the CPU."""
    rows = parts_of(home.group, home.number)[0]
    if isinstance(rows, Tensor):
        return rows[low:high]
    return torch.cat([rows.read(*chunk) for chunk in chunks_of(rows.store, rows.table, low, high)])


def _of_files(step_files: Files) -> dict[str, Tensor]:
    manifest = read_manifest(step_files.path)
    for facts in manifest.files:
        check_checksum(step_files, facts)
    files, tensors = TensorFiles(step_files, manifest), {}
    for (kind, name, state), pieces in manifest.by_address.items():
        if state != WEIGHT or kind == OPTIMIZER:
            continue
        facts_of_table = manifest.tables.get(name)
        shape = pieces[0].shape if facts_of_table is None else (facts_of_table.rows, facts_of_table.dim)
        whole = torch.empty(shape, dtype=pieces[0].dtype, device="cpu")
        everything = tuple((0, size) for size in shape)
        for piece in pieces:
            box = box_of(piece)
            target = part_of(whole, everything, box)
            shift = tuple(low for low, _ in box)
            for part, block in files.blocks(piece, within(box, shift)):
                part_of(target, within(box, shift), part).copy_(block)
        tensors[name] = whole
    files.close()
    return {**tensors, **{name: tensors[original] for name, original in manifest.aliases.items()}}
