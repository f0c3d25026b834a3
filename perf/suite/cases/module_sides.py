"""The same tables, batches and optimizer in modules of ours and of the peers: one side each, called alike and
checked against the computation in plain torch.

Shapes: T tables of R_t rows x D columns, B samples, N ids I; outputs [B, T * D] pooled, [N, D] as a sequence, fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.perf.suite.case import OURS
from shardwise.perf.suite.libraries import fbgemm, torchrec
from shardwise.perf.suite.peers import assert_close, stepped
from shardwise.perf.suite.workloads import Workload, draw, fitted

# rule -> arguments of its optimizer
RULES: dict[str, Mapping[str, Any]] = {"sgd": {"lr": 0.02}, "rowwise_adagrad": {"lr": 0.01, "eps": 1e-8}}
_OPTIMIZERS = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
# of the largest element: sums of tens of rows in another order
TOLERANCE = 2e-5
# elements of the piece of random values that tables are filled with again and again: no multiple of any dim
_PIECE = 1_000_003


@dataclass(frozen=True)
class Setup:
    """The settings that every side is made from.

    Attributes:
        rule: of RULES, which runs in the backward; "" for tables that nothing trains.
        pooled: sums of bags; else the row of each id.
        joined: the output is put together from its parts by name, as TorchRec's benchmark does, not taken whole.
        on_host: batches are on the CPU and moved in the step.
    """

    workload: Workload
    device: str = "cpu"
    rule: str = "sgd"
    pooled: bool = True
    joined: bool = False
    on_host: bool = False

    @property
    def keys(self) -> list[str]:
        """A feature for each table."""
        return [f"f{t}" for t in range(len(self.workload.rows))]


@dataclass(frozen=True)
class Batch:
    """Ids I [N] feature by feature, lengths int32 [T * B], and the same as offsets [T * B + 1] and table by table."""

    ids: Tensor
    lengths: Tensor
    offsets: Tensor
    by_table: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Side:
    """One library's module: its tables [R_t, D], how it looks a batch up, and what it does after the backward.

    `made` is what holds the memory.
    """

    tables: Sequence[Tensor]
    look_up: Callable[[Batch], Tensor]
    after: Callable[[], object] = lambda: None
    # the optimizer is another than the one that ours has, so that only outputs can be compared
    own_rule: bool = False
    made: Sequence[object] = field(default=(), repr=False)


def fit(workload: Workload, memory_bytes: int, sides: int, *, copies: float = 1.0) -> Workload:
    """Rows cut until the tables of so many sides fit, each `copies` times."""
    return fitted(workload, int(memory_bytes / (copies * sides)), workload.dtype.itemsize)


def batches_of(setup: Setup, count: int) -> list[Batch]:
    """Distinct batches, where the sides get them from."""
    return [_batch(setup, *draw(setup.workload, seed)) for seed in range(count)]


def _batch(setup: Setup, ids: Tensor, lengths: Tensor) -> Batch:
    device = "cpu" if setup.on_host else setup.device
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    size = setup.workload.batch
    starts = offsets[::size].tolist()
    by_table = [
        (ids[low:high].to(device), (offsets[t * size : (t + 1) * size + 1] - low).to(device))
        for t, (low, high) in enumerate(zip(starts, starts[1:], strict=False))
    ]
    return Batch(ids.to(device), lengths.int().to(device), offsets.to(device), by_table)


@torch.no_grad()
def fill(tables: Sequence[Tensor]) -> None:
    """Small random values, one piece of them over and over: gigabytes at the speed of a copy."""
    piece = torch.rand(_PIECE, generator=torch.Generator().manual_seed(0)).sub_(0.5).mul_(0.1).to(tables[0])
    start = 0
    for table in tables:
        flat = table.view(-1)
        done = 0
        while done < flat.shape[0]:
            n = min(_PIECE - start, flat.shape[0] - done)
            flat[done : done + n].copy_(piece[start : start + n])
            done, start = done + n, (start + n) % _PIECE


def sides_of(setup: Setup, peers: Mapping[str, Callable[[Setup], Side]]) -> dict[str, Side]:
    """Ours and those that `peers` make, with equal tables.

    Raises:
        ImportError: a peer is not installed.
    """
    made = {OURS: ours(setup)}
    fill(made[OURS].tables)
    for name, make in peers.items():
        made[name] = make(setup)
        with torch.no_grad():
            for table, peer_table in zip(made[OURS].tables, made[name].tables, strict=True):
                peer_table.copy_(table)
    return made


def _leave(table: Tensor) -> Tensor:
    # to draw gigabytes that are then overwritten takes seconds
    return table


def configs_of(library: Any, setup: Setup) -> list[Any]:
    """Configs of the tables, by the names of TorchRec that `library` has."""
    kind = library.EmbeddingBagConfig if setup.pooled else library.EmbeddingConfig
    return [
        kind(name=f"t{t}", num_embeddings=rows, embedding_dim=setup.workload.dim, feature_names=[key], init_fn=_leave)
        for t, (rows, key) in enumerate(zip(setup.workload.rows, setup.keys, strict=True))
    ]


def ours(setup: Setup) -> Side:
    """A collection of ours, tables not filled."""
    kind = shardwise.EmbeddingBagCollection if setup.pooled else shardwise.EmbeddingCollection
    made: Any = kind(configs_of(shardwise, setup), device=setup.device)
    if setup.rule:
        optimizer = torch.optim.SGD if setup.rule == "sgd" else shardwise.RowWiseAdagrad
        shardwise.apply_optimizer_in_backward(optimizer, made.parameters(), dict(RULES[setup.rule]))
        made.fused_optimizer()
    return Side([p.data for p in made.parameters()], keyed(setup, shardwise, made), made=[made])


def keyed(setup: Setup, library: Any, module: Any) -> Callable[[Batch], Tensor]:
    """Look a batch up by a KeyedJaggedTensor that is made anew, since it keeps what it has computed."""
    device, keys = torch.device(setup.device), setup.keys

    def look_up(batch: Batch) -> Tensor:
        features = library.KeyedJaggedTensor(keys=keys, values=batch.ids, lengths=batch.lengths).to(device)
        output = module(features)
        if not setup.pooled:
            return torch.cat([rows.values() for rows in output.values()])
        if setup.joined:
            return torch.cat([part for part in output.to_dict().values()], dim=1)  # noqa: C416
        values: Tensor = output.values()
        return values

    return look_up


def torch_side(setup: Setup) -> Side:
    """A torch.nn.EmbeddingBag (or Embedding) a table, with sparse gradients, and an optimizer of torch.optim.

    There is no rowwise Adagrad in torch.optim: Adagrad stands for it, whose states are as large as the tables.
    """
    shapes = [(rows, setup.workload.dim) for rows in setup.workload.rows]
    weights = [torch.empty(shape, dtype=setup.workload.dtype, device=setup.device) for shape in shapes]
    if setup.pooled:
        modules: list[nn.Module] = [
            nn.EmbeddingBag(*shape, mode="sum", sparse=True, include_last_offset=True, _weight=weight)
            for shape, weight in zip(shapes, weights, strict=True)
        ]
    else:
        modules = [
            nn.Embedding(*shape, sparse=True, _weight=weight) for shape, weight in zip(shapes, weights, strict=True)
        ]
    parameters = [p for module in modules for p in module.parameters()]
    kind: Any = torch.optim.SGD if setup.rule == "sgd" else torch.optim.Adagrad
    optimizer: Any = kind(parameters, **RULES[setup.rule]) if setup.rule else None
    device = torch.device(setup.device)

    def look_up(batch: Batch) -> Tensor:
        outputs = []
        for module, (ids, offsets) in zip(modules, batch.by_table, strict=True):
            bags = (offsets.to(device),) if setup.pooled else ()
            outputs.append(module(ids.to(device), *bags))
        return torch.cat(outputs, dim=1 if setup.pooled else 0)

    return Side(
        [p.data for p in parameters],
        look_up,
        stepped(optimizer),
        own_rule=setup.rule == "rowwise_adagrad",
        made=modules,
    )


def fbgemm_side(setup: Setup) -> Side:
    """FBGEMM's table-batched op by itself, which gets offsets and no keys."""
    peer, on_cpu = fbgemm(), setup.device == "cpu"
    home = peer.EmbeddingLocation.HOST if on_cpu else peer.EmbeddingLocation.DEVICE
    computes = peer.ComputeDevice.CPU if on_cpu else peer.ComputeDevice.CUDA
    arguments = dict(RULES[setup.rule or "sgd"])
    made = peer.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, setup.workload.dim, home, computes) for rows in setup.workload.rows],
        optimizer=peer.EmbOptimType[_OPTIMIZERS[setup.rule or "sgd"]], learning_rate=arguments.pop("lr"), **arguments,
        pooling_mode=peer.PoolingMode.SUM if setup.pooled else peer.PoolingMode.NONE,
        device=torch.device(setup.device),
    )  # fmt: skip
    device = torch.device(setup.device)

    def look_up(batch: Batch) -> Tensor:
        output: Tensor = made(batch.ids.to(device), batch.offsets.to(device))
        return output

    return Side(made.split_embedding_weights(), look_up, made=[made])


def torchrec_side(setup: Setup) -> Side:
    """TorchRec's fused collection; its plain one for tables that nothing trains."""
    peer, device = torchrec(), torch.device(setup.device)
    if not setup.rule:
        plain = peer.EmbeddingBagCollection if setup.pooled else peer.EmbeddingCollection
        return _torchrec_side(setup, plain(tables=configs_of(peer, setup), device=device))
    optimizer: Any = peer.RowWiseAdagrad if setup.rule == "rowwise_adagrad" else torch.optim.SGD
    kind = peer.FusedEmbeddingBagCollection if setup.pooled else peer.FusedEmbeddingCollection
    made = kind(
        tables=configs_of(peer, setup), optimizer_type=optimizer, optimizer_kwargs=dict(RULES[setup.rule]),
        device=device,
    )  # fmt: skip
    return _torchrec_side(setup, made)


def unfused_side(setup: Setup) -> Side:
    """TorchRec's plain collection, and torch.optim.SGD over dense gradients of whole tables."""
    made = torchrec().EmbeddingBagCollection(tables=configs_of(torchrec(), setup), device=torch.device(setup.device))
    optimizer: Any = torch.optim.SGD(made.parameters(), **RULES["sgd"])
    return replace(_torchrec_side(setup, made), after=stepped(optimizer))


def _torchrec_side(setup: Setup, made: Any) -> Side:
    known = {name.split(".")[-2]: value for name, value in made.state_dict().items()}
    tables = [known[f"t{t}"] for t in range(len(setup.workload.rows))]
    return Side(tables, keyed(setup, torchrec(), made), made=[made])


PEERS: Mapping[str, Callable[[Setup], Side]] = {
    "torch": torch_side, "fbgemm": fbgemm_side, "torchrec": torchrec_side,
}  # fmt: skip


def step_of(side: Side, batch: Batch, grad: Tensor | None) -> Tensor:
    """A training step and its output; without `grad` the loss is the sum of the output."""
    output = side.look_up(batch)
    if grad is None:
        output.sum().backward()  # type: ignore[no-untyped-call]
    else:
        torch.autograd.backward(output, grad)
    side.after()
    return output.detach()


@torch.no_grad()
def forward_of(side: Side, batch: Batch) -> Tensor:
    """A lookup that nothing is trained by."""
    return side.look_up(batch)


def touched_rows(batch: Batch) -> list[Tensor]:
    """Distinct rows of each table that the batch names."""
    return [torch.unique(ids) for ids, _ in batch.by_table]


def forward_bytes(setup: Setup, batch: Batch) -> float:
    """A row for each id, ids and lengths once, the output once."""
    work, n = setup.workload, batch.ids.shape[0]
    outputs = work.batch * len(work.rows) if setup.pooled else n
    return n * work.dim * work.dtype.itemsize + outputs * work.dim * 4 + batch.ids.nbytes + batch.lengths.nbytes


def step_bytes(setup: Setup, batch: Batch) -> float:
    """The forward's, and as kernels/update declares: gradient rows, touched rows and states twice, 96 an id."""
    work, n = setup.workload, batch.ids.shape[0]
    distinct = sum(rows.shape[0] for rows in touched_rows(batch))
    a_row = work.dim * work.dtype.itemsize + (4 if setup.rule == "rowwise_adagrad" else 0)
    return forward_bytes(setup, batch) + n * work.dim * 4 + 2 * distinct * a_row + 96 * n


def assert_forwards(setup: Setup, sides: Mapping[str, Side], batch: Batch) -> None:
    """Each side's output of a batch is the one of plain torch."""
    expected = expected_output(setup, sides[OURS].tables, batch)
    for who, side in sides.items():
        assert_close(forward_of(side, batch), expected, TOLERANCE, f"output of {who}")


def assert_steps(setup: Setup, sides: Mapping[str, Side], batch: Batch, grad: Tensor | None) -> None:
    """Each side's first step, from equal tables, gives the output and the rows of plain torch; it is taken."""
    touched = touched_rows(batch)
    expected = expected_output(setup, sides[OURS].tables, batch)
    upstream = torch.ones_like(expected) if grad is None else grad
    rows = expected_rows(setup, sides[OURS].tables, batch, upstream, touched)
    for who, side in sides.items():
        assert_close(step_of(side, batch, grad), expected, TOLERANCE, f"output of {who}")
        if not side.own_rule:
            for t, (table, named, row) in enumerate(zip(side.tables, touched, rows, strict=True)):
                assert_close(table[named], row, TOLERANCE, f"rows of table {t} of {who} after a step")


@torch.no_grad()
def expected_output(setup: Setup, tables: Sequence[Tensor], batch: Batch) -> Tensor:
    """The lookup in plain torch."""
    outputs = []
    for table, (ids, offsets) in zip(tables, batch.by_table, strict=True):
        rows = table[ids.to(table.device)].float()
        if setup.pooled:
            bags = _bags(offsets).to(table.device)
            rows = rows.new_zeros(setup.workload.batch, rows.shape[1]).index_add_(0, bags, rows)
        outputs.append(rows)
    return torch.cat(outputs, dim=1 if setup.pooled else 0)


@torch.no_grad()
def expected_rows(
    setup: Setup, tables: Sequence[Tensor], batch: Batch, grad: Tensor, touched: Sequence[Tensor]
) -> list[Tensor]:
    """The `touched` rows of each table after the first step of the rule."""
    dim, rows_after, start = setup.workload.dim, [], 0
    lr = RULES[setup.rule]["lr"]
    for t, (table, (ids, offsets), named) in enumerate(zip(tables, batch.by_table, touched, strict=True)):
        ids, named = ids.to(table.device), named.to(table.device)
        if setup.pooled:
            of_ids = grad[:, t * dim : (t + 1) * dim][_bags(offsets).to(table.device)]
        else:
            of_ids = grad[start : start + ids.shape[0]]  # [ids of the table, dim]
            start += ids.shape[0]
        of_rows = torch.zeros(named.shape[0], dim, device=table.device)  # [touched rows, dim]
        of_rows.index_add_(0, torch.searchsorted(named, ids), of_ids)
        if setup.rule == "rowwise_adagrad":
            # the state begins at 0, and is the mean of the squares after one step
            of_rows /= of_rows.square().mean(1, keepdim=True).sqrt() + RULES[setup.rule]["eps"]
        rows_after.append(table[named].float() - lr * of_rows)
    return rows_after


def _bags(offsets: Tensor) -> Tensor:
    """The bag of each id, [N]."""
    return torch.repeat_interleave(torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff())
