"""Sections of `nccl_check`, each run on the ranks of a process group, and the models that they take.

All numbers are small multiples of powers of two, so that no sum is rounded: whatever a plan cuts, bits must be those of
one process that has the batches of all ranks. Whatever differs on one rank, all of them call the same collectives.

Shapes: W ranks, T tables of R rows x D columns, B samples a rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    DLRM,
    Batch,
    DistributedModelParallel,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    RankFailure,
    ShardingEnv,
    ShardingPlan,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    in_backward_optimizer_filter,
)
from shardwise.checkpoint import full_state_dict, latest, load, save
from shardwise.perf.suite.timing import gb_per_s
from shardwise.sharding import (
    accumulate,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.comms.env import is_alone
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.qcomms import CommType, QCommsConfig, get_qcomm_codecs_registry

# a section that waits longer than this for another rank has failed; and how soon a failed rank is to be noticed
STUCK_S, NOTICED_S = 60.0, 20.0
DENSE, LR = 4, 0.5


@dataclass(frozen=True)
class Sizes:
    """Tables and batches, and numbers a rank sends for the bandwidths."""

    tables: int = 4
    rows: int = 5000
    dim: int = 64
    batch: int = 512
    steps: int = 3
    sent: tuple[int, ...] = (1 << 10, 1 << 18, 1 << 22, 1 << 26)
    repeats: int = 20


SMALL = Sizes(rows=60, dim=32, batch=12, sent=(1 << 6, 1 << 12), repeats=3)


@dataclass
class Ranks:
    """What a section works with: a process group, its ranks as two hosts where they divide, a device, sizes."""

    device: torch.device
    sizes: Sizes
    group: dist.ProcessGroup
    local: int
    rank: int = field(init=False)
    world: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def env(self) -> ShardingEnv:
        """The ranks of the group."""
        return ShardingEnv.from_process_group(self.group, local_world_size=self.local)

    @property
    def keys(self) -> list[str]:
        """Features, one a table."""
        return [f"f{n}" for n in range(self.sizes.tables)]

    def span(self) -> tuple[int, int]:
        """This rank's samples of the whole batch."""
        return self.rank * self.sizes.batch, (self.rank + 1) * self.sizes.batch


def ways(ranks: Ranks) -> dict[str, Callable[[int], Any]]:
    """How table n is cut, by the name of the sharding type."""
    hosts, last = list(range(ranks.world // ranks.local)), ranks.world - 1
    ends = [0, last]
    # of a host; parts are of whole 16 bytes, the last has what is left
    part = max(4, ranks.sizes.dim // ranks.local // 4 * 4)
    widths = [part] * (ranks.local - 1) + [ranks.sizes.dim - part * (ranks.local - 1)]
    return {
        "data_parallel": lambda n: data_parallel(),
        "table_wise": lambda n: table_wise(rank=n % ranks.world),
        "row_wise": lambda n: row_wise(),
        "column_wise": lambda n: column_wise(ranks=ends),
        "table_row_wise": lambda n: table_row_wise(host_index=n % len(hosts)),
        "table_column_wise": lambda n: table_column_wise(host_index=n % len(hosts), size_per_rank=widths),
        "grid_shard": lambda n: grid_shard(host_indexes=hosts),
        "mixed": lambda n: (table_wise(rank=last), row_wise(), column_wise(ranks=ends), data_parallel())[n % 4],
    }


def tables_of(ranks: Ranks, *, pooled: bool, scale: float = 1.0) -> Any:
    """The unsharded tables with SGD in their backward; weights are sixteenths from -1/2 to 1/2 times `scale`."""
    sizes, generator = ranks.sizes, torch.Generator().manual_seed(7)
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    configs = [config(sizes.rows, sizes.dim, f"t{n}", feature_names=[key]) for n, key in enumerate(ranks.keys)]
    made: Any = EmbeddingBagCollection(configs) if pooled else EmbeddingCollection(configs)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randint(-8, 9, weight.shape, generator=generator) / 16 * scale)
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": LR})
    return made


def lengths_and_ids(ranks: Ranks, step: int) -> tuple[Tensor, list[Tensor]]:
    """Lengths [T, W * B] of the bags of all ranks, and the ids of each table."""
    sizes, generator = ranks.sizes, torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(0, 4, (sizes.tables, ranks.world * sizes.batch), generator=generator)
    return lengths, [torch.randint(0, sizes.rows, (int(n),), generator=generator) for n in lengths.sum(1)]


def batch_of(ranks: Ranks, step: int, *, whole: bool = False) -> KeyedJaggedTensor:
    """The batch of this rank, or of all ranks together, on the host."""
    lengths, ids = lengths_and_ids(ranks, step)
    low, high = (0, lengths.shape[1]) if whole else ranks.span()
    cut = [of_feature[lengths[n, :low].sum() : lengths[n, :high].sum()] for n, of_feature in enumerate(ids)]
    return KeyedJaggedTensor(ranks.keys, torch.cat(cut), lengths=lengths[:, low:high].flatten())


def upstream(shape: Sequence[int], seed: int) -> Tensor:
    """A gradient in eighths from -1/2 to 1/2."""
    return torch.randint(-4, 5, tuple(shape), generator=torch.Generator().manual_seed(seed)) / 8


def matrices(looked_up: Any, keys: Sequence[str]) -> list[Tensor]:
    """What a lookup gave, one matrix a feature, or one of all."""
    return [looked_up.values()] if not isinstance(looked_up, dict) else [looked_up[key].values() for key in keys]


def train(ranks: Ranks, model: nn.Module, steps: Sequence[int], *, whole: bool) -> list[list[Tensor]]:
    """Outputs of these steps; gradients of this rank are its part of those of all, times the ranks."""
    outputs = []
    for step in steps:
        lengths, _ = lengths_and_ids(ranks, step)
        low, high = ranks.span()
        looked_up = matrices(model(batch_of(ranks, step, whole=whole).to(ranks.device)), ranks.keys)
        gradients = []
        for n, matrix in enumerate(looked_up):
            # rows of bags, or of ids, of all ranks together
            pooled = len(looked_up) == 1
            rows = lengths.shape[1] if pooled else int(lengths[n].sum())
            a, b = (low, high) if pooled else (int(lengths[n, :low].sum()), int(lengths[n, :high].sum()))
            given = upstream((rows, matrix.shape[1]), 10 * step + n)
            gradients.append((given if whole else given[a:b] * ranks.world).to(ranks.device))
        outputs.append([matrix.detach().clone() for matrix in looked_up])
        torch.autograd.backward(looked_up, gradients)
    return outputs


def sharded(
    ranks: Ranks, module: nn.Module, path: str, tables: nn.Module, way: Callable[[int], Any], **more: Any
) -> Any:
    """The model with `tables`, which are at `path` in it, cut this way."""
    plan = construct_module_sharding_plan(
        tables, {f"t{n}": way(n) for n in range(ranks.sizes.tables)}, None, ranks.local, ranks.world, ranks.device.type
    )
    model = DistributedModelParallel(
        module, ranks.env, ranks.device, ShardingPlan({path: plan}), timeout_s=STUCK_S, **more
    )
    # a rank that is alone exchanges nothing, and nothing would be checked
    assert not is_alone(ranks.group)
    return model


def sharded_tables(ranks: Ranks, way: Callable[[int], Any], *, pooled: bool = True, **more: Any) -> Any:
    """The tables by themselves, cut this way."""
    tables = tables_of(ranks, pooled=pooled, scale=more.pop("scale", 1.0))
    return sharded(ranks, nn.Sequential(tables), "0", tables, way, **more)


def differing(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors whose bits differ."""
    assert tensors.keys() == expected.keys(), (sorted(tensors), sorted(expected))
    return [name for name, value in tensors.items() if not torch.equal(value.cpu(), expected[name].cpu())]


def steps_beside_one_process(ranks: Ranks, way: Callable[[int], Any], *, pooled: bool, **more: Any) -> str:
    """Outputs and tables that differ in some steps; "" where no bit does."""
    steps = range(ranks.sizes.steps)
    alone = nn.Sequential(tables_of(ranks, pooled=pooled)).to(ranks.device)
    expected = train(ranks, alone, steps, whole=True)
    model = sharded_tables(ranks, way, pooled=pooled, **more)
    outputs = train(ranks, model, steps, whole=False)
    low, high = ranks.span()
    wrong = []
    for step, (own_outputs, reference_outputs) in enumerate(zip(outputs, expected, strict=True)):
        lengths, _ = lengths_and_ids(ranks, step)
        for n, (own, reference) in enumerate(zip(own_outputs, reference_outputs, strict=True)):
            a, b = (low, high) if pooled else (int(lengths[n, :low].sum()), int(lengths[n, :high].sum()))
            if not torch.equal(own, reference[a:b]):
                wrong.append(f"output {n} of step {step} by {float((own - reference[a:b]).abs().max())}")
    # all ranks call this, whatever differs on one of them
    wrong += differing(full_state_dict(model), alone.state_dict())
    return ", ".join(wrong)


def sharding_types(ranks: Ranks) -> dict[str, Any]:
    """Train steps of every sharding type, pooled and as sequences, against one process that has all batches."""
    differences = {}
    for name, way in ways(ranks).items():
        for pooled in (True, False):
            differences[f"{name}, {'pooled' if pooled else 'sequence'}"] = steps_beside_one_process(
                ranks, way, pooled=pooled
            )
    return _required(differences)


def codecs(ranks: Ranks) -> dict[str, Any]:
    """Rows and gradients as fp16 and bf16, which hold these numbers; and a number that fp16 does not."""
    differences = {}
    for kind in (CommType.FP16, CommType.BF16):
        registry = get_qcomm_codecs_registry(QCommsConfig(kind, kind))
        sharders: Any = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)]
        for name in ("table_wise", "row_wise"):
            label = f"{kind.name}, {name}"
            differences[label] = steps_beside_one_process(ranks, ways(ranks)[name], pooled=True, sharders=sharders)
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    sharders = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)]
    model = sharded_tables(ranks, lambda n: table_wise(rank=0), scale=1e9, sharders=sharders)
    try:
        model(batch_of(ranks, 0).to(ranks.device)).values()
        differences["overflow"] = "nothing raised"
    except OverflowError as error:
        differences["overflow"] = "" if "too large" in str(error) else str(error)
    return _required(differences)


def _dlrm(ranks: Ranks) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(5)
    tables = tables_of(ranks, pooled=True)
    net = DLRMTrain(DLRM(tables, DENSE, [8, ranks.sizes.dim], [8, 1], dense_device=ranks.device))
    (path,) = (name for name, module in net.named_modules() if module is tables)
    model = sharded(ranks, net, path, tables, ways(ranks)["mixed"])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, torch.optim.SGD(dense.values(), lr=0.01)


def _samples(ranks: Ranks, steps: int) -> Iterator[Batch]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * ranks.rank + step)
        dense, labels = (torch.rand(ranks.sizes.batch, n, generator=generator) for n in (DENSE, 1))
        batch = Batch(dense, batch_of(ranks, step), labels.flatten().round())
        yield batch.pin_memory() if ranks.device.type == "cuda" else batch


def pipelines(ranks: Ranks) -> dict[str, Any]:
    """A DLRM through the pipelines, and by micro-batches, against a plain loop under the same plan."""
    steps = 4 * ranks.sizes.steps
    model, optimizer = _dlrm(ranks)
    losses = []
    for batch in _samples(ranks, steps):
        optimizer.zero_grad()
        loss, _ = model(batch.to(ranks.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    expected = full_state_dict(model)
    differences = {}
    for kind in (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
        piped, optimizer = _dlrm(ranks)
        pipeline: Any = kind(piped, optimizer, ranks.device)
        batches, piped_losses = _samples(ranks, steps), []
        while True:
            try:
                piped_losses.append(pipeline.progress(batches)[0].detach().clone())
            except StopIteration:
                break
        wrong = [f"loss {n}" for n, pair in enumerate(zip(piped_losses, losses, strict=True)) if not torch.equal(*pair)]
        wrong += differing(full_state_dict(piped), expected)
        differences[kind.__name__] = ", ".join(wrong)
    differences["accumulation"] = _micro_batches(ranks)
    return _required(differences)


def _micro_batches(ranks: Ranks) -> str:
    """Tables that differ where the gradients of two batches wait for one step; "" where no bit does."""
    tables = tables_of(ranks, pooled=True).to(ranks.device)
    alone, states = nn.Sequential(tables), []
    for whole in (True, False):
        model: Any = alone if whole else sharded_tables(ranks, ways(ranks)["mixed"])
        fused: Any = tables.fused_optimizer() if whole else model.fused_optimizer
        with accumulate(model):
            train(ranks, model, [0], whole=whole)
        train(ranks, model, [1], whole=whole)
        fused.step()
        fused.zero_grad()
        states.append(alone.state_dict() if whole else full_state_dict(model))
    return ", ".join(differing(states[1], states[0]))


def checkpoint(ranks: Ranks) -> dict[str, Any]:
    """Save, load under another plan and train on, against training without a stop."""
    plans, exchange = ways(ranks), Exchange(ranks.group)
    steps = range(2 * ranks.sizes.steps)
    straight = sharded_tables(ranks, plans["row_wise"])
    expected = train(ranks, straight, steps, whole=False)[ranks.sizes.steps :]
    first = sharded_tables(ranks, plans["row_wise"])
    train(ranks, first, steps[: ranks.sizes.steps], whole=False)
    with _shared_folder(exchange) as folder:
        begin = time.perf_counter()
        save(folder, first, step=1)
        saved_s = time.perf_counter() - begin
        second = sharded_tables(ranks, plans["mixed"], scale=0.0)
        step = latest(folder)
        assert step is not None
        begin = time.perf_counter()
        load(step, second)
        loaded_s = time.perf_counter() - begin
        # nobody deletes what another still reads
        exchange.numbers(torch.zeros(ranks.world, device=ranks.device)).wait().tolist()
    outputs = train(ranks, second, steps[ranks.sizes.steps :], whole=False)
    flat, wanted = ([tensor for step in of_run for tensor in step] for of_run in (outputs, expected))
    same = all(map(torch.equal, flat, wanted))
    wrong = differing(full_state_dict(second), full_state_dict(straight))
    differences = {"outputs after loading": "" if same else "differ", "tables": ", ".join(wrong)}
    return {**_required(differences), "save_s": round(saved_s, 3), "load_s": round(loaded_s, 3)}


@contextmanager
def _shared_folder(exchange: Exchange) -> Iterator[str]:
    """A folder of rank 0, by its name on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield exchange.value(own.encode(), 0).decode()


def bandwidths(ranks: Ranks) -> dict[str, Any]:
    """Times of an exchange of so many numbers a rank, and bytes a second that leave a rank."""
    exchange = Exchange(ranks.group)
    header = torch.zeros(ranks.world, 16, dtype=torch.int64, device=ranks.device)
    us = _times(ranks, lambda: exchange.all_to_all(header, what="headers").wait())
    times: dict[str, Any] = {"header": {"us": us}}
    for numbers in ranks.sizes.sent:
        each = max(1, numbers // ranks.world)
        sizes, sent = [each] * ranks.world, torch.ones(each * ranks.world, device=ranks.device)

        def rows(sent: Tensor = sent, sizes: list[int] = sizes) -> None:
            exchange.rows(sent, sizes, sizes).wait()

        us = _times(ranks, rows)
        size = f"{4 * each * ranks.world} bytes"
        times[f"rows, {size}"] = {"us": us, "gb_per_s": gb_per_s(4 * each * (ranks.world - 1), us)}
        times[f"mean, {size}"] = {"us": _times(ranks, partial(exchange.mean, [sent]))}
    return times


def _times(ranks: Ranks, call: Callable[[], object]) -> float:
    times = []
    for turn in range(ranks.sizes.repeats + 3):
        _synchronize(ranks.device)
        begin = time.perf_counter()
        call()
        _synchronize(ranks.device)
        times.append((time.perf_counter() - begin) * 1e6 if turn >= 3 else 0.0)
    return round(median(times[3:]), 1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Failing(nn.Module):
    """Tables, and an error of the last rank after its lookup in step 1."""

    def __init__(self, tables: nn.Module, fails: bool) -> None:
        super().__init__()
        self.tables, self.fails, self.step = tables, fails, 0

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.tables(batch).values()
        self.step += 1
        if self.fails and self.step == 2:
            raise ZeroDivisionError("the last rank's second step")
        return pooled


def failure(ranks: Ranks) -> dict[str, Any]:
    """A bad id on the last rank raises on all, which go on; an error of its own closes the group on all, soon."""
    last, tables = ranks.world - 1, tables_of(ranks, pooled=True)
    model = sharded(ranks, Failing(tables, ranks.rank == last), "tables", tables, ways(ranks)["row_wise"])
    batch, differences = batch_of(ranks, 0).to(ranks.device), {}
    bad = KeyedJaggedTensor(ranks.keys, batch.values().clone().fill_(ranks.sizes.rows), lengths=batch.lengths())
    with model.watched():
        try:
            model.module.tables(bad if ranks.rank == last else batch).values()
            differences["bad id"] = "nothing raised"
        except IndexError as error:
            differences["bad id"] = "" if f"rank {last}" in str(error) else str(error)
    raised, named = "nothing", None
    begin = time.perf_counter()
    for step in range(3):
        try:
            with model.watched():
                output = model(batch_of(ranks, step).to(ranks.device))
                output.backward(torch.zeros_like(output))
                _synchronize(ranks.device)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            named = getattr(error, "ranks", None)
            break
    seconds = time.perf_counter() - begin
    wanted = "ZeroDivisionError" if ranks.rank == last else "RankFailure"
    well = raised.startswith(wanted) and (ranks.rank == last or named == (last,))
    differences["own error"] = "" if well and seconds < NOTICED_S else f"after {seconds:.1f} s: {raised}"
    try:
        model.module.tables(batch)
        differences["group after it"] = "an exchange went through"
    except RankFailure:
        differences["group after it"] = ""
    return {**_required(differences), "seconds": round(seconds, 2), "raised": raised.split(". ")[0][:300]}


def _required(differences: dict[str, str]) -> dict[str, Any]:
    """How much was compared.

    Raises:
        AssertionError: something differs.
    """
    wrong = {name: difference for name, difference in differences.items() if difference}
    assert not wrong, f"differs: {wrong}"
    return {"compared": len(differences)}


SECTIONS: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "sharding_types": sharding_types,
    "codecs": codecs,
    "pipelines": pipelines,
    "checkpoint": checkpoint,
    "bandwidths": bandwidths,
    "failure": failure,
}
