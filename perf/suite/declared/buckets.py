"""The bytes that the kernels of bucketing, deduplication and calibration declare, as functions of a call.

Letters as in the modules. Sorts and sums between the launches are torch's, and not counted here.
"""

from __future__ import annotations

from torch import Tensor

from .lookup import Traffic


def block_bucketize_bytes(
    lengths: Tensor, ids: Tensor, buckets: int, weights: Tensor | None, positions: bool, permute: bool
) -> Traffic:
    """Of `block_bucketize`: ids there and back, by way of their bucket, bag and row; what is asked for."""
    n = ids.shape[0]
    bucket, bag = 1 if buckets < 2**8 else 2 if buckets < 2**15 else 4, 4 if lengths.shape[0] < 2**31 else 8
    per_id = 0 if weights is None else weights.nbytes
    reads = {"I": ids.nbytes, "source": 8 * n, "bucket": bucket * n, "bag": bag * n, "local": ids.nbytes, "P": per_id}
    writes = {"bucket": bucket * n, "bag": bag * n, "local": ids.nbytes, "new_ids": ids.nbytes, "new_weights": per_id}
    writes |= {"positions": ids.nbytes * positions, "permute": ids.nbytes * permute}
    # the first and the last place of each (bucket, bag) that has ids
    writes["counted"] = 2 * lengths.itemsize * min(n, buckets * lengths.shape[0])
    return Traffic(reads, writes)


def jagged_unique_bytes(ids: Tensor, rows: int, distinct: int) -> Traffic:
    """Of `jagged_unique`: a key for each id, its number and place, and each distinct id there and back."""
    n, key = ids.shape[0], 4 if rows + 1 < 2**31 else 8
    reads = {"I": ids.nbytes + ids.itemsize * distinct, "source": 8 * n, "number": 8 * n}
    return Traffic(reads, {"keys": key * n, "inverse": 8 * n, "unique": ids.itemsize * distinct})


def histogram_binning_bytes(logit: Tensor, value: Tensor | None, lengths: Tensor | None) -> Traffic:
    """Of the calibrations: logits there, predictions and bins back, two numbers of a bin, a value of a segment."""
    n = logit.numel()
    reads = {"X": logit.nbytes, "E": 8 * n, "H": 8 * n}
    if value is not None and lengths is not None:
        reads |= {"V": value.nbytes, "L": lengths.nbytes, "starts": 8 * n}
    return Traffic(reads, {"Y": logit.nbytes, "bin_ids": 8 * n})
