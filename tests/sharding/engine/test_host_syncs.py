"""How often a sharded step waits for its GPU, counted without one; and a bad batch raises from what is read then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import bag_tables
from ranks import run_ranks
from sharding_mixes import environment
from torch import Tensor

from shardwise import EmbeddingBagCollection, KeyedJaggedTensor, ShardingEnv
from shardwise.embeddings import GradientCheckMode, LookupPolicy
from shardwise.embeddings.tables import id_check
from shardwise.jagged._segments import Beside
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.kernels.lookup.bounds import OK
from shardwise.perf.counts.counted_ranks import WAYS, sharded_step
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda
from shardwise.planner import layout
from shardwise.sharding.comms.codecs import FP16, FormatCodec
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.qcomms import CommType, QCommsConfig, get_qcomm_codecs_registry
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")

# the guard of the ids and the sizes that leave, in one copy; then those that come
SIZES = ["copy to host in jagged/_segments.py _read", "copy to host in sharding/comms/consensus.py receive"]
GUARD = "copy to host in jagged/_segments.py read"


def waits() -> dict[str, list[str]]:
    """By how tables are cut, what a rank waits for in a step."""
    syncs_by_way = {}
    for way in WAYS:
        with use_fake_cuda(counts := Counted()):
            prepare = sharded_step(CUDA, way=way)
            for turn in range(2):
                prepare(turn)()
            step = prepare(2)
            counts.clear()
            step()
        syncs_by_way[way] = sorted(counts.syncs.elements())
    return syncs_by_way


@pytest.mark.ranks
def test_a_sharded_step_waits_twice_however_tables_are_cut() -> None:
    """It waited five times, and six where rows are cut: buckets were counted after the sizes of the batch were read."""
    for syncs_by_way in run_ranks(2, waits):
        assert syncs_by_way == dict.fromkeys(WAYS, SIZES)


def sharded(rows: dict[str, int], cut: Any, env: ShardingEnv, codecs: Any = None, **settings: Any) -> Any:
    """Tables on the device that is not there."""
    shards = [shard for name, count in rows.items() for shard in cut(f"t{name}", count)]
    return ShardedEmbeddingBagCollection(
        EmbeddingBagCollection(bag_tables(rows, 4), device=CUDA, **settings), shards, env, CUDA,
        default_optimizer=(torch.optim.SGD, {"lr": 0.01}), codecs=codecs,
    )  # fmt: skip


def batch(lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]).to(CUDA), lengths=torch.tensor(lengths).to(CUDA))


def test_numbers_beside_sizes_come_in_one_copy_and_only_where_sizes_are_read() -> None:
    with use_fake_cuda(counts := Counted()):
        kjt, beside, later = batch([1, 0, 2, 0]), Beside(torch.tensor([7, 8]).to(CUDA)), Beside(torch.ones(2).to(CUDA))
        counts.clear()
        assert kjt._sizes(beside) == [1, 2]
        assert counts.copies == {"to host": 1}
        assert kjt._sizes(later) == kjt.length_per_key() == [1, 2]
        assert counts.copies == {"to host": 1}
        bad = Beside(torch.tensor([9]).to(CUDA))
        with pytest.raises(ValueError, match="lengths sum to 4, values has 3"):
            batch([1, 0, 2, 1])._sizes(bad)
    assert (beside.numbers, later.numbers, bad.numbers) == ([7, 8], None, [9])


BAD_ID = "feature 'b' (table 'tb'), sample 0: id 3 is outside [0, 3)"
FITS, LONG = [1, 0, 2, 0], [1, 0, 2, 1]


@pytest.mark.parametrize(
    ("guard", "lengths", "known", "error", "text"),
    [
        ([2, OK, OK], FITS, False, IndexError, BAD_ID),
        ([2, OK, OK], FITS, True, IndexError, BAD_ID),
        # a bad offset explains lengths that do not fit, and is named
        ([OK, 4, OK], LONG, False, ValueError, "offsets end at 4 but there are 3 ids"),
        ([OK, OK, OK], LONG, False, ValueError, "lengths sum to 4, values has 3"),
        ([OK, OK, OK], FITS, False, None, ""),
        ([OK, OK, OK], FITS, True, None, ""),
    ],
)
def test_a_bad_batch_raises_before_its_ids_leave(
    guard: list[int],
    lengths: list[int],
    known: bool,
    error: type[Exception] | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device that is not there looks at ids on its host; so what its kernel would say is written here."""

    def written(ids: Tensor, offsets: Tensor, features: Tensor, into: Any, **more: Any) -> None:
        into.host.copy_(torch.tensor(guard))

    with use_fake_cuda(counts := Counted()):
        model = sharded(
            {"a": 10, "b": 3}, lambda name, rows: layout.table_wise(name, rows, 4, 0), ShardingEnv.from_local(1, 0)
        )
        model(batch([2, 1, 0, 0]))
        monkeypatch.setattr(id_check, "check_ids", written)
        kjt = batch(lengths)
        if known:
            kjt.length_per_key()
        counts.clear()
        if error is None:
            model(kjt)
            assert counts.syncs == Counter([GUARD if known else SIZES[0], SIZES[1]])
            return
        with pytest.raises(error) as raised:
            model(kjt)
    assert text in str(raised.value)


def compressed() -> list[str]:
    """What a rank waits for when it sends rows as fp16, with a flag."""
    exchange, codec = Exchange(dist.group.WORLD), FormatCodec(FP16)
    sizes = [4, 4]
    with use_fake_cuda(counts := Counted()):
        send, flag = torch.ones(8).to(CUDA), torch.full((1,), dist.get_rank(), dtype=torch.int32).to(CUDA)
        counts.clear()
        pending = exchange.rows(send, sizes, sizes, codec=codec, flag=flag)
        sent = list(counts.syncs.elements())
        received = pending.wait()
        assert received.cpu().tolist() == [1.0] * 8 and pending.flags == [0, 1]
    return sent


# what all ranks say of the numbers that they sent, read where those arrive
FLAGS = "copy to host in sharding/comms/exchange.py read"


def checked() -> list[list[str]]:
    """What a rank waits for forward, and in all: rows as fp16, then gradients that are looked at, with weights."""
    syncs = []
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    policies = (LookupPolicy(), codecs), (LookupPolicy(gradient_check=GradientCheckMode.RAISE), None)
    for policy, codec in policies:
        with use_fake_cuda(counts := Counted()):
            model = sharded(
                {"a": 10, "b": 10}, lambda name, rows: layout.row_wise(name, rows, 4, range(2)), environment(),
                is_weighted=True, policy=policy, codecs=codec,
            )  # fmt: skip
            grad, weights = torch.ones(2, 8).to(CUDA), torch.ones(3).to(CUDA).requires_grad_()
            for _ in range(2):
                ids, lengths = torch.tensor([1, 2, 9]).to(CUDA), torch.tensor([1, 0, 2, 0]).to(CUDA)
                kjt = KeyedJaggedTensor(["a", "b"], ids, weights, lengths)
                counts.clear()
                output = model(kjt).values()
                syncs.append(sorted(counts.syncs.elements()))
                output.backward(grad)
                syncs.append(sorted(counts.syncs.elements()))
        syncs = [*syncs[:-4], *syncs[-2:]]
    return syncs


@pytest.mark.ranks
def test_numbers_that_are_looked_at_cost_a_wait_each_way() -> None:
    """Two for compressed rows or gradients, up to three for gradients that are looked at; those of weights one more."""
    forward = sorted([*SIZES, FLAGS])
    assert run_ranks(2, checked) == [[forward, sorted([*forward, FLAGS]), SIZES, forward]] * 2


@pytest.mark.ranks
def test_a_flag_leaves_without_a_wait() -> None:
    """It was copied to the device, which waits for all that runs there."""
    assert run_ranks(2, compressed) == [[], []]
