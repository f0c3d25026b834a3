"""Random batches for FBGEMM's modules of tables, and small functions that its programs and benchmarks call.

Shapes: T tables of E rows, B samples each, bags of L ids: indices [N], offsets [T * B + 1]. Numbers come from torch's
generators, so `torch.manual_seed` repeats them; they are not those of FBGEMM's, which draws by numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardwise.kernels import complete_cumsum

Deviceable = TypeVar("Deviceable", nn.EmbeddingBag, nn.Embedding, Tensor)
# candidates of a bag at least, so that even a skewed draw has L that differ
_CANDIDATES = 20


@dataclass
class TBERequest:
    """A batch: indices [N], offsets, per-sample weights [N], and batch sizes `[T][R]` where they differ."""

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None = None
    Bs_per_feature_per_rank: list[list[int]] | None = None

    def unpack_2(self) -> tuple[Tensor, Tensor]:
        """Indices and offsets."""
        return self.indices, self.offsets

    def unpack_3(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Indices, offsets and weights."""
        return self.indices, self.offsets, self.per_sample_weights

    def unpack_4(self) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]] | None]:
        """All four."""
        return self.indices, self.offsets, self.per_sample_weights, self.Bs_per_feature_per_rank


def round_up(a: int, b: int) -> int:
    """The least multiple of `b` that is not less than `a`."""
    return -(-a // b) * b


def get_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(t: Deviceable, use_cpu: bool) -> Deviceable:
    """A tensor or module on the CPU, or on CUDA."""
    return t.cpu() if use_cpu else t.cuda()


def tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of any shape on a device; of one on meta an empty one there."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def get_table_batched_offsets_from_dense(
    merged_indices: Tensor, L: int | None = None, total_B: int | None = None, use_cpu: bool = False
) -> tuple[Tensor, Tensor]:
    """Indices [T * B * L] and offsets [T * B + 1] of indices [T, B, L], or of `total_B` bags of `L` in any shape.

    Raises:
        ValueError: one of `L` and `total_B` is given without the other.
    """
    if L is None and total_B is None:
        tables, samples, L = merged_indices.shape
        total_B = tables * samples
    if L is None or total_B is None:
        raise ValueError(f"L and total_B are given both or not at all, got {L} and {total_B}")
    offsets = torch.arange(total_B + 1, device="cpu") * L
    return to_device(merged_indices.reshape(-1), use_cpu), to_device(offsets, use_cpu)


def get_offsets_from_dense(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [B * L] and the beginnings [B] of bags of indices [B, L], as `torch.nn.EmbeddingBag` takes them."""
    samples, length = indices.shape
    return indices.reshape(-1), torch.arange(samples, device="cpu") * length


def b_indices(
    b: Callable[..., Tensor],
    x: Tensor,
    per_sample_weights: Tensor | None = None,
    use_cpu: bool = False,
    do_pooling: bool = True,
) -> Tensor:
    """Look indices [B, L] up in a `torch.nn.EmbeddingBag`, or without pooling in a `torch.nn.Embedding`."""
    indices, offsets = get_offsets_from_dense(x)
    if not do_pooling:
        return b(to_device(indices, use_cpu))
    return b(to_device(indices, use_cpu), to_device(offsets, use_cpu), per_sample_weights=per_sample_weights)


def generate_requests(
    iters: int,
    B: int,
    T: int,
    L: int,
    E: int,
    reuse: float = 0.0,
    alpha: float = 1.0,
    zipf_oversample_ratio: int = 3,
    weighted: bool = False,
    requests_data_file: str | None = None,
    indices_file: str | None = None,
    offsets_file: str | None = None,
    tables: str | None = None,
    sigma_L: int | None = None,
    Ls: list[int] | None = None,
    sigma_B: int | None = None,
    emulate_pruning: bool = False,
    use_cpu: bool = False,
    deterministic_output: bool = False,
    length_dist: str = "normal",
    batch_size_dist: str = "normal",
    vbe_num_ranks: int | None = None,
    index_dtype: torch.dtype | None = None,
    offset_dtype: torch.dtype | None = None,
    Es: list[int] | None = None,
) -> list[TBERequest]:
    """Random batches for T tables.

    Args:
        iters: how many.
        B, L: samples of a table and ids of a bag; means where `sigma_B` or `sigma_L` is given.
        E, Es: rows of all tables, or of each.
        reuse: the part of ids that a batch takes from the one before, at the same places.
        alpha: above 1 ids of a bag differ and are Zipf distributed by it, on rows in a random order; else uniform.
        zipf_oversample_ratio: candidates for each of them.
        weighted: whether there are per-sample weights, normally distributed.
        requests_data_file, indices_file, offsets_file, tables: saved tensors to take instead of random ones, and which
            tables of them, between commas.
        sigma_L, sigma_B: their deviation ("normal"), or the largest ("uniform", from L or B on).
        Ls: the lengths of bags of each table.
        emulate_pruning: have half as many ids as samples be -1, in every table.
        use_cpu: on the CPU, else on CUDA where it is available.
        deterministic_output: the order of rows under a Zipf distribution is the same at each call.
        length_dist, batch_size_dist: "normal" or "uniform".
        vbe_num_ranks: ranks that batch sizes are drawn for; wanted with `sigma_B`.
        index_dtype, offset_dtype: int32 and int64 by default.

    Raises:
        ValueError: arguments exclude each other, or a bag is longer than its table has rows (Zipf).
    """
    device = torch.device("cpu") if use_cpu else get_device()
    files = (requests_data_file, indices_file, offsets_file)
    if any(files):
        if sigma_L is not None or sigma_B is not None:
            raise ValueError(
                "batches from a file have their own lengths and batch sizes: leave sigma_L and sigma_B out"
            )
        saved = _saved(*files, tables=tables, shape=(T, B, L), rows=E)
        return [_request(*saved, device, weighted, index_dtype, offset_dtype, None) for _ in range(iters)]
    for name, values in (("Ls", Ls), ("Es", Es)):
        if values is not None and len(values) != T:
            raise ValueError(f"{name} must have {T} numbers, one for each table, got {len(values)}")
    if Ls is not None and sigma_L is not None:
        raise ValueError("Ls and sigma_L exclude each other")
    if (reuse > 0 or emulate_pruning) and (Ls is not None or sigma_L is not None):
        raise ValueError("reuse and emulate_pruning want bags of one length: leave Ls and sigma_L out")
    if emulate_pruning and sigma_B is not None:
        raise ValueError("emulate_pruning wants one batch size: leave sigma_B out")
    sizes = None if sigma_B is None else _batch_sizes(B, T, sigma_B, vbe_num_ranks, batch_size_dist)
    samples = [B] * T if sizes is None else [sum(of_table) for of_table in sizes]
    # lengths of bags are those of every batch
    if Ls is not None:
        lengths = torch.tensor(Ls).repeat_interleave(torch.tensor(samples))
    elif sigma_L is not None:
        lengths = _whole_numbers(L, sigma_L, sum(samples), length_dist).clamp(min=0)
    else:
        lengths = torch.full((sum(samples),), L)
    table = torch.arange(T).repeat_interleave(torch.tensor(samples))
    rows = torch.full((T,), E) if Es is None else torch.tensor(Es)
    offsets = complete_cumsum(lengths)
    requests, before = [], None
    for _ in range(iters):
        if alpha <= 1:
            ids = _uniform_ids(rows[table], lengths)
        else:
            ids = _zipf_ids(rows, table, lengths, alpha, zipf_oversample_ratio, deterministic_output)
        if before is not None and reuse > 0:
            ids = _reused(ids, before, [count * L for count in samples], reuse)
        before = ids
        if emulate_pruning and L:
            ids = ids.clone().view(T, B * L)
            for of_table in ids:
                of_table[torch.randint(B * L, (B // 2,))] = -1
            ids = ids.flatten()
        requests.append(_request(ids, offsets, device, weighted, index_dtype, offset_dtype, sizes))
    return requests


def _request(
    ids: Tensor,
    offsets: Tensor,
    device: torch.device,
    weighted: bool,
    index_dtype: torch.dtype | None,
    offset_dtype: torch.dtype | None,
    sizes: list[list[int]] | None,
) -> TBERequest:
    weights = torch.randn(ids.numel(), device=device) if weighted else None
    return TBERequest(ids.to(device, index_dtype), offsets.to(device, offset_dtype), weights, sizes)


def _whole_numbers(mean: int, sigma: int, count: int, distribution: str) -> Tensor:
    if distribution not in ("normal", "uniform"):
        raise ValueError(f"a distribution is 'normal' or 'uniform', got {distribution!r}")
    if distribution == "uniform" and sigma < mean:
        raise ValueError(f"a uniform distribution is from L or B to its sigma: sigma {sigma} is less than {mean}")
    if distribution == "uniform":
        return torch.randint(mean, sigma + 1, (count,))
    return torch.normal(float(mean), float(sigma), (count,)).trunc().long()


def _batch_sizes(mean: int, tables: int, sigma: int, ranks: int | None, distribution: str) -> list[list[int]]:
    if ranks is None:
        raise ValueError("sigma_B wants vbe_num_ranks: how many ranks to draw batch sizes for")
    drawn = _whole_numbers(mean, sigma, tables * ranks, distribution).abs().clamp(min=1)
    sizes: list[list[int]] = drawn.view(tables, ranks).tolist()
    return sizes


def _uniform_ids(rows: Tensor, lengths: Tensor) -> Tensor:
    """Ids [N] int32 of bags of `lengths` [bags] whose tables have `rows` [bags], ascending in each bag."""
    of_bag = rows.repeat_interleave(lengths)
    # a product may be rounded up to the number of rows
    ids = torch.minimum((torch.rand(len(of_bag), dtype=torch.float64) * of_bag).long(), of_bag - 1)
    bag = torch.arange(len(lengths)).repeat_interleave(lengths)
    # stable by bag after a sort by id: ascending within each bag
    ids, order = ids.sort()
    return ids[bag[order].sort(stable=True).indices].int()


def _zipf_ids(rows: Tensor, table: Tensor, lengths: Tensor, alpha: float, oversample: int, repeatable: bool) -> Tensor:
    """Ids [N] int32 that differ within each bag, in Zipf's distribution over the rows of its table."""
    longest = int(lengths.max()) if len(lengths) else 0
    if not longest:
        return torch.empty(0, dtype=torch.int32)
    of_bag = rows[table]
    if bool((lengths > of_bag).any()):
        raise ValueError(f"bags of {longest} ids that differ want as many rows, tables have {rows.tolist()}")
    candidates = (_zipf((len(lengths), max(oversample * longest, _CANDIDATES)), alpha) - 1) % of_bag[:, None]
    candidates = candidates.sort(dim=1).values
    is_first = torch.ones_like(candidates, dtype=torch.bool)
    is_first[:, 1:] = candidates[:, 1:] != candidates[:, :-1]
    if bool((short := is_first.sum(1) < lengths).any()):
        raise ValueError(
            f"too skewed distribution: {int(short.sum())} bags have fewer candidates that differ than ids; alpha is"
            f" {alpha}: lower it, or raise zipf_oversample_ratio"
        )
    ranks = candidates[is_first & (is_first.cumsum(1) <= lengths[:, None])]
    generator = torch.Generator().manual_seed(12345) if repeatable else None
    of_id = table.repeat_interleave(lengths)
    ids = torch.empty_like(ranks)
    for t, count in enumerate(rows.tolist()):
        here = of_id == t
        ids[here] = torch.randperm(count, generator=generator)[ranks[here]]
    return ids.int()


def _zipf(shape: Sequence[int], alpha: float) -> Tensor:
    """Numbers from 1 on, n with a probability of n^-alpha over its sum, by rejection (Devroye 1986, chapter X.6)."""
    power, most = alpha - 1, 2.0**62
    ratio = 2.0**power
    drawn = torch.zeros(tuple(shape), dtype=torch.float64).flatten()
    wanted = torch.arange(len(drawn))
    while len(wanted):
        u, v = 1 - torch.rand(2, len(wanted), dtype=torch.float64)
        x = u.pow(-1 / power).floor()
        t = (1 + 1 / x).pow(power)
        good = (x < most) & (v * x * (t - 1) / (ratio - 1) <= t / ratio)
        drawn[wanted[good]] = x[good]
        wanted = wanted[~good]
    return drawn.long().view(tuple(shape))


def _reused(ids: Tensor, before: Tensor, counts: Sequence[int], part: float) -> Tensor:
    """The ids with a part of those of each table, which has so many, from the batch before."""
    ids, begin = ids.clone(), 0
    for count in counts:
        places = begin + torch.randperm(count)[: int(count * part)]
        ids[places] = before[places]
        begin += count
    return ids


def _saved(
    requests_file: str | None,
    indices_file: str | None,
    offsets_file: str | None,
    *,
    tables: str | None,
    shape: tuple[int, int, int],
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Indices and offsets from one file or from two, of the tables that are asked for."""
    if requests_file and (indices_file or offsets_file):
        raise ValueError("requests_data_file has indices and offsets: leave indices_file and offsets_file out")
    if requests_file:
        indices, offsets, *_ = torch.load(requests_file, weights_only=True)
    elif indices_file and offsets_file:
        indices, offsets = (torch.load(file, weights_only=True) for file in (indices_file, offsets_file))
    else:
        raise ValueError("indices_file and offsets_file are given both or not at all")
    (T, B, L) = shape
    if tables is not None:
        bounds = [offsets[B * int(t) : B * (int(t) + 1) + 1] for t in tables.split(",")]
        indices = torch.cat([indices[of_table[0] : of_table[-1]] for of_table in bounds])
        offsets = complete_cumsum(torch.cat([of_table.diff() for of_table in bounds]))
    if offsets.numel() - 1 != T * B:
        raise ValueError(f"the file has {offsets.numel() - 1} bags, T * B is {T} * {B}")
    if (mean := int(offsets[-1] - offsets[0]) // B) != L:
        raise ValueError(f"L must be the ids of a sample in the file, {mean}, got {L}")
    if indices.numel() and int(indices.max()) >= rows:
        raise ValueError(f"the file has index {int(indices.max())}, tables have E={rows} rows")
    return indices, offsets
