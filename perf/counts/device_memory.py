"""Most bytes of the device that a step has at a time, and what they are, counted without a GPU.

Counted is what tensors of the path of CUDA take, forward and backward, beyond what is there between steps: weights,
states, the batch and the gradient that the caller gives. Not counted: what torch's own kernels take while they run, as
its sort does, and how the allocator rounds.

    python -m shardwise.perf.counts.device_memory            bytes an id of each step, and their causes
    python -m shardwise.perf.counts.device_memory --update   the same, kept in device_memory.json
"""

from __future__ import annotations

import argparse
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise import (
    DataType,
    DistributedModelParallel,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.perf.counts import baseline
from shardwise.perf.counts.counted_steps import KEYS, SHAPE, Prepare, bag_step, batch_of, collection, sequence_step
from shardwise.perf.counts.fake_cuda import CUDA, DeviceMemory, Op, use_fake_cuda
from shardwise.perf.counts.launches import Counted, caller
from shardwise.perf.counts.many_ranks import fake_ranks
from shardwise.perf.counts.steps import WARM_UP, Count, Counts
from shardwise.perf.suite.timing import collector_off
from shardwise.sharding import table_wise

RANKS = 2
BASELINE = Path(__file__).with_suffix(".json")


@dataclass
class Peak(Counted):
    """What `Counted` counts, and the memory that was allocated since `clear()`.

    Attributes:
        live: bytes that are not given back.
        bytes: the most that there were at a time.
        causes: those by the function of shardwise that allocated, the operation and the dtype.
    """

    live: int = 0
    bytes: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    # cause and bytes of what is live, by the identity of its memory
    _pieces: dict[int, tuple[str, int]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all; what is live now counts no more, neither here nor when it is given back."""
        super().clear()
        self.live = self.bytes = 0
        self.causes.clear()
        self._pieces.clear()

    def allocation(self, memory: DeviceMemory, op: Op, dtype: torch.dtype) -> None:
        if not memory.nbytes:
            return
        name = f"{op._schema.name.removeprefix('aten::')} {str(dtype).removeprefix('torch.')}"
        self._pieces[id(memory)] = (f"{caller()}: {name}", memory.nbytes)
        weakref.finalize(memory, self._give_back, id(memory)).atexit = False
        self.live += memory.nbytes
        if self.live > self.bytes:
            self.bytes, self.causes = self.live, Counter()
            for cause, nbytes in self._pieces.values():
                self.causes[cause] += nbytes

    def _give_back(self, memory: int) -> None:
        _, nbytes = self._pieces.pop(memory, ("", 0))
        self.live -= nbytes


def sharded_step(device: torch.device) -> Prepare:
    """Forward and backward of rank 0, which has every other table; its batch has ids of all of them."""
    module = collection(device)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    ways = {f"t{t}": table_wise(t % RANKS) for t in range(len(KEYS))}
    plan = construct_module_sharding_plan(module, ways, None, RANKS, RANKS, device.type)
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD, local_world_size=RANKS)  # type: ignore[arg-type]
    model = DistributedModelParallel(module, env, device, ShardingPlan({"": plan}), timeout_s=None)
    gradient = torch.full((SHAPE.batch, SHAPE.dim * len(KEYS)), 0.1).to(device)

    def prepare(turn: int) -> Callable[[], object]:
        batch = batch_of(turn, device)
        return lambda: model(batch).values().backward(gradient)

    return prepare


class Budget(NamedTuple):
    """How a step is made, on how many ranks, and the most bytes that it may have at a time for an id of its batch.

    Of those, partial sums take D / 4 + 1 and what is looked up 4 D over the ids of a bag: here D is 128, and a bag has
    32 ids in the mean.
    """

    make: Callable[[torch.device], Prepare]
    ranks: int
    bytes_an_id: int


BUDGETS = {
    "EBC step, SGD": Budget(partial(bag_step, optimizer=torch.optim.SGD), 1, 99),
    "EBC step, rowwise Adagrad": Budget(partial(bag_step, optimizer=RowWiseAdagrad), 1, 99),
    "EBC step, weighted, SGD": Budget(partial(bag_step, optimizer=torch.optim.SGD, is_weighted=True), 1, 103),
    "EBC step, fp16, SGD": Budget(partial(bag_step, optimizer=torch.optim.SGD, data_type=DataType.FP16), 1, 100),
    "EC step, SGD": Budget(sequence_step, 1, 1107),
    f"sharded EBC step, table-wise, {RANKS} ranks": Budget(sharded_step, RANKS, 127),
}


def peak_of(name: str) -> Peak:
    """The most bytes of a step by name, in a turn after those that warm up."""
    make, ranks, _ = BUDGETS[name]
    with use_fake_cuda(seen := Peak()), fake_ranks(ranks) if ranks > 1 else nullcontext():
        prepare = make(CUDA)
        for turn in range(WARM_UP):
            prepare(turn)()
        call = prepare(WARM_UP)
        seen.clear()
        with collector_off():
            call()
    return seen


def ids_of_a_batch() -> int:
    """N, whatever the turn."""
    return batch_of(0, torch.device("cpu")).values().shape[0]


def counts_of(name: str) -> Counts:
    """The most bytes of a step at a time, by their causes."""
    return {"peak bytes on the device": Count.of(peak_of(name).causes)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Most bytes of the device that a step has at a time, by their causes.")
    parser.add_argument("--update", action="store_true", help="Keep them in device_memory.json.")
    given = parser.parse_args(argv)
    ids, counts = ids_of_a_batch(), {name: counts_of(name) for name in BUDGETS}
    for name, of_step in counts.items():
        for peak in of_step.values():
            print(f"{name}: {peak.total:,} bytes, {peak.total / ids:.1f} an id; budget {BUDGETS[name].bytes_an_id}")
            for cause, nbytes in Counter(peak.parts).most_common():
                print(f"  {nbytes / ids:7.2f}  {cause}")
    if given.update:
        kept = baseline.read(BASELINE) if BASELINE.is_file() else {}
        baseline.write(BASELINE, {**kept, baseline.versions(): counts})


if __name__ == "__main__":
    main()
