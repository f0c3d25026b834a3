"""How much memory the rows of a module's tables take here."""

from __future__ import annotations

from itertools import chain

from torch import nn

# rows of a table, and scales of quantized ones
_ROWS = ("weight", "weight_qscale", "weight_qbias")


def weights_bytes_in_emb_kernel(emb: nn.Module) -> int:
    """Bytes of the rows that a module of tables holds here, scales of quantized rows included, optimizer states not.

    Args:
        emb: a collection, sharded or not, quantized or not, or a module with several; a table that several modules
            share counts once.
    """
    named = chain(emb.named_parameters(), emb.named_buffers())
    rows = [tensor for name, tensor in named if name.rpartition(".")[2] in _ROWS]
    sizes = {(t.untyped_storage().data_ptr(), t.storage_offset()): t.element_size() * t.numel() for t in rows}
    return sum(sizes.values())
