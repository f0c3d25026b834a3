"""Keyed batches, bags and tensors between ranks, and rows of ids on their way back, beside one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import pytest
import torch
import torch.distributed as dist
from jagged_batches import gradient_of
from ranks import error_of, run_ranks, world_group
from torch import Tensor
from torch.testing import assert_close

from shardwise import KeyedJaggedTensor
from shardwise.jagged import JaggedTensor, kjt_is_equal
from shardwise.sharding.comms.qcomms import CommType, QCommsConfig, get_qcomm_codecs
from shardwise.sharding.torchrec.bucketize import bucketize_kjt_before_all2all
from shardwise.sharding.torchrec.dist_data import (
    JaggedTensorAllToAll,
    KJTAllToAll,
    KJTOneToAll,
    SplitsAllToAllAwaitable,
    TensorAllToAll,
    TensorValuesAllToAll,
    recat,
)
from shardwise.sharding.torchrec.pooled_dist import SequenceEmbeddingsAllToAll

WORLDS = [1, 2, 4]
KINDS = ("even", "uneven", "variable", "empty")
ROWS = 23
# a bag of a sample: ids and weights
Bag = tuple[list[int], list[float]]


def splits_of(world: int) -> list[int]:
    """Rank 2 gets no key."""
    return [(2, 1, 0, 3)[r % 4] for r in range(world)]


def keys_of(world: int) -> list[str]:
    return [f"f{i}" for i in range(sum(splits_of(world)))]


def bags_of(rank: int, key: int, batch: int) -> list[Bag]:
    generator = torch.Generator().manual_seed(31 * rank + key)
    lengths = torch.randint(0, 4, (batch,), generator=generator).tolist()
    return [
        (torch.randint(0, ROWS, (n,), generator=generator).tolist(), torch.rand(n, generator=generator).tolist())
        for n in lengths
    ]


def joined(
    bags: Sequence[Bag], weighted: bool = True, dtype: torch.dtype = torch.int64, counts: torch.dtype = torch.int32
) -> JaggedTensor:
    ids = torch.tensor([i for ids, _ in bags for i in ids], dtype=dtype)
    weights = torch.tensor([w for _, weights in bags for w in weights]) if weighted else None
    return JaggedTensor(ids, weights, torch.tensor([len(ids) for ids, _ in bags], dtype=counts))


def batch_of(
    keys: Sequence[str], bags: Sequence[Sequence[Bag]], weighted: bool, variable: bool, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    jagged = joined([bag for of_key in bags for bag in of_key], weighted, dtype)
    return KeyedJaggedTensor(
        list(keys), jagged.values(), jagged.weights_or_none(), jagged.lengths(),
        stride=None if variable else len(bags[0]) if bags else 0,
        stride_per_key_per_rank=[[len(of_key)] for of_key in bags] if variable else None,
    )  # fmt: skip


def stride_of(kind: str, rank: int, key: int) -> int:
    return {"even": 3, "uneven": (2, 0, 4, 1)[rank % 4], "variable": (rank + 2 * key) % 4, "empty": 0}[kind]


def check_kjt(stagger: int) -> None:
    rank, world, pg = dist.get_rank(), dist.get_world_size(), world_group()
    splits, keys = splits_of(world), keys_of(world)
    begin = sum(splits[:rank])
    own_keys = range(begin, begin + splits[rank])
    exchange = KJTAllToAll(pg, splits, stagger)
    in_row = world // stagger
    order = [column + in_row * row for column in range(in_row) for row in range(stagger)]
    for kind, weighted, dtype in product(KINDS, (False, True), (torch.int64, torch.int32)):
        bags = [bags_of(rank, k, stride_of(kind, rank, k)) for k in range(len(keys))]
        variable = kind == "variable"
        received = exchange(batch_of(keys, bags, weighted, variable, dtype)).wait().wait()
        # of ranks in order
        bags_by_key = [[bag for r in order for bag in bags_of(r, k, stride_of(kind, r, k))] for k in own_keys]
        wanted = batch_of([keys[k] for k in own_keys], bags_by_key, weighted, variable, dtype)
        assert received.values().dtype == dtype
        if len(own_keys):
            assert kjt_is_equal(received, wanted) or (variable and same_bags(received, wanted)), (kind, weighted)
        else:
            assert received.keys() == []
            assert received.values().numel() == 0
        if variable and world > 1 and len(own_keys):
            strides = [[stride_of(kind, r, k) for r in order] for k in own_keys]
            assert received.stride_per_key_per_rank() == strides


def same_bags(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    """Equal but for which rank has how much of a key's batch."""
    weights = a.weights_or_none(), b.weights_or_none()
    return (
        a.keys() == b.keys()
        and a.stride_per_key() == b.stride_per_key()
        and torch.equal(a.lengths(), b.lengths())
        and torch.equal(a.values(), b.values())
        and (weights[0] is None or torch.equal(weights[0], weights[1]))  # type: ignore[arg-type]
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stagger"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_each_rank_gets_its_keys_of_all_batches(world: int, stagger: int) -> None:
    run_ranks(world, check_kjt, stagger)


def in_rows(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags of dense rows [3] in the place of ids, and of rows [2] in the place of weights."""
    weights = kjt.weights_or_none()
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values()[:, None] * torch.tensor([1.0, -1.0, 0.5]),
        None if weights is None else torch.stack([weights, -weights], 1), kjt.lengths(),
        stride=None if kjt.variable_stride_per_key() else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None,
    )  # fmt: skip


def check_rows() -> str:
    """Each rank's keys of all batches, whose values are rows; then what is said where rank 1 has wider ones."""
    rank, world, pg = dist.get_rank(), dist.get_world_size(), world_group()
    splits, keys = splits_of(world), keys_of(world)
    begin = sum(splits[:rank])
    exchange = KJTAllToAll(pg, splits)
    for kind, weighted in product(KINDS, (False, True)):
        bags = [bags_of(rank, k, stride_of(kind, rank, k)) for k in range(len(keys))]
        received = exchange(in_rows(batch_of(keys, bags, weighted, kind == "variable"))).wait().wait()
        own_keys = range(begin, begin + splits[rank])
        by_key = [[bag for r in range(world) for bag in bags_of(r, k, stride_of(kind, r, k))] for k in own_keys]
        wanted = in_rows(batch_of([keys[k] for k in own_keys], by_key, weighted, kind == "variable"))
        assert same_bags(received, wanted), (kind, weighted)
    wide = KeyedJaggedTensor(keys, torch.zeros(len(keys), 2 + rank), lengths=torch.ones(len(keys), dtype=torch.int64))
    return error_of(exchange(wide).wait)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_dense_rows_travel_with_their_bags(world: int) -> None:
    errors = run_ranks(world, check_rows)
    assert all(world == 1 or "call another collective" in error for error in errors)


def check_disagreements() -> list[str]:
    """What is said where rank 1 has another batch, in one thing at a time."""
    rank, pg, errors = dist.get_rank(), world_group(), []
    bags = [bags_of(rank, k, 2) for k in range(3)]
    for difference in ("keys", "weights", "batches", "dtype", "splits"):
        other = difference if rank == 1 else ""
        keys, splits = ["a", "b", "x" if other == "keys" else "c"], [1, 2] if other == "splits" else [2, 1]
        dtype = torch.int32 if other == "dtype" else torch.int64
        batch = batch_of(keys, bags, other == "weights", other == "batches", dtype)
        errors.append(error_of(KJTAllToAll(pg, splits)(batch).wait))
    return errors


@pytest.mark.ranks
def test_ranks_with_other_batches_are_told_so_before_tensors_travel() -> None:
    """With weights on one rank alone sizes of the exchange do not match: it hung, or gave another rank's numbers."""
    first, second = run_ranks(2, check_disagreements)
    assert all("ranks [1] call another collective" in text for text in first)
    assert all("ranks [0] call another collective" in text for text in second)


def check_pieces() -> None:
    rank, world, pg = dist.get_rank(), dist.get_world_size(), world_group()
    # splits, of several tensors at once
    a, b = (torch.tensor([f * 100 + 10 * rank + r for r in range(world)]) for f in (1, 2))
    wanted = [[f * 100 + 10 * r + rank for r in range(world)] for f in (1, 2)]
    assert SplitsAllToAllAwaitable([a, b], pg).wait() == wanted
    assert SplitsAllToAllAwaitable([a, b], pg, 7, ("this",)).wait() == wanted
    if world > 1:
        with pytest.raises(RuntimeError, match=r"ranks \[.*\('this',\)"):
            SplitsAllToAllAwaitable([a], pg, rank, ("this",)).wait()
    for tensors, words in (([], "no splits"), ([torch.zeros(world + 1)], "a number for each of")):
        with pytest.raises(ValueError, match=words):
            SplitsAllToAllAwaitable(tensors, pg)

    # rows of tensors
    counts = [[(s + 2 * t) % 3 for t in range(world)] for s in range(world)]
    for shape in ((), (3,), (2, 2)):
        for dtype in (torch.int64, torch.float32, torch.uint8):
            rows = [
                [torch.full((counts[s][t], *shape), 10 * s + t, dtype=dtype) for t in range(world)]
                for s in range(world)
            ]
            send, receive = torch.tensor(counts[rank]), torch.tensor([counts[s][rank] for s in range(world)])
            wanted_rows = torch.cat([rows[s][rank] for s in range(world)])
            own_rows = torch.cat(rows[rank])
            assert torch.equal(TensorAllToAll(pg)(own_rows, send).wait().wait(), wanted_rows)
            assert torch.equal(TensorAllToAll(pg)(own_rows, send.int()).wait().wait(), wanted_rows)
            assert torch.equal(TensorValuesAllToAll(pg)(own_rows, send, receive).wait(), wanted_rows)
    with pytest.raises(ValueError, match="do not add up"):
        TensorValuesAllToAll(pg)(torch.zeros(1000), send, receive)
    with pytest.raises(ValueError, match="splits must have one entry"):
        TensorAllToAll(pg)(torch.zeros(1), torch.ones(world + 1, dtype=torch.int64))

    # bags
    all_bags = [[bags_of(source, target, counts[source][target]) for target in range(world)] for source in range(world)]
    for weighted in (False, True):
        counted = torch.int64 if weighted else torch.int32
        jt = joined([bag for bags in all_bags[rank] for bag in bags], weighted, counts=counted)
        received = JaggedTensorAllToAll(jt, send, receive, pg).wait()
        expected = joined([bag for bags in all_bags for bag in bags[rank]], weighted, counts=counted)
        assert torch.equal(received.values(), expected.values())
        assert torch.equal(received.lengths(), expected.lengths())
        assert not weighted or torch.equal(received.weights(), expected.weights())
    with pytest.raises(ValueError, match="do not add up to"):
        JaggedTensorAllToAll(jt, send + 1, receive, pg)


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_splits_rows_and_bags_arrive_rank_after_rank(world: int) -> None:
    run_ranks(world, check_pieces)


def check_freed() -> None:
    rank, pg = dist.get_rank(), world_group()
    batch = batch_of(["a", "b"], [bags_of(rank, k, 5) for k in range(2)], weighted=True, variable=False)
    sizes = batch.values().numel() * (8 + 4) + batch.lengths().numel() * 4
    tensors = KJTAllToAll(pg, [1, 1])(batch).wait()
    assert tensors.clear_inputs() == sizes
    assert batch.values().untyped_storage().nbytes() == 0
    wanted = [bag for r in range(2) for bag in bags_of(r, rank, 5)]
    assert kjt_is_equal(tensors.wait(), batch_of(["ab"[rank]], [wanted], True, False))


@pytest.mark.ranks
def test_clear_inputs_frees_what_was_sent_and_the_result_stays() -> None:
    run_ranks(2, check_freed)


def check_row_wise(kind: str, weighted: bool) -> None:
    """Ids to the ranks that hold their rows, rows back: every id gets its row, and every row its gradient."""
    rank, world, pg = dist.get_rank(), dist.get_world_size(), world_group()
    keys = ["a", "b"]
    tables = [torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    block = -(-ROWS // world)
    strides = [[stride_of(kind, r, k) for k in range(2)] for r in range(world)]
    batch = batch_of(keys, [bags_of(rank, k, strides[rank][k]) for k in range(2)], weighted, kind == "variable")
    divided, permute = bucketize_kjt_before_all2all(batch, world, torch.tensor([block, block]), output_permute=True)
    assert permute is not None
    tensors = KJTAllToAll(pg, [2] * world)(divided).wait()
    sent = divided.dist_splits([2] * world)[1]
    arrived = tensors.wait()
    shards = [table[rank * block : (rank + 1) * block].clone().requires_grad_() for table in tables]
    ids = torch.split(arrived.values(), arrived.length_per_key())
    rows = torch.cat([weight[i] for weight, i in zip(shards, ids, strict=True)])
    empty = TensorAllToAll(pg)(torch.zeros(0), torch.zeros(world, dtype=torch.int64)).wait()
    assert empty.wait().numel() == 0
    received = SplitsAllToAllAwaitable([torch.tensor(sent)], pg).wait()[0]
    # segments of bags, where batches of keys and ranks differ
    order = bags_order(strides, world) if kind == "variable" and world > 1 else None
    back = SequenceEmbeddingsAllToAll(pg, [2] * world)(
        rows, arrived.lengths(), sent, received, permute,
        list(range(world)) if order is not None else [n for n, _ in strides], order,
    ).wait()  # fmt: skip
    wanted = [tables[k][joined(bags_of(rank, k, strides[rank][k])).values()] for k in range(2)]
    assert torch.equal(back, torch.cat(wanted))
    assert kind == "empty" or back.requires_grad
    (back * (rank + 1)).sum().backward()
    for k in range(2):
        counts = torch.zeros(ROWS)
        for r in range(world):
            looked_up = joined(bags_of(r, k, strides[r][k])).values()
            counts.index_add_(0, looked_up, torch.full((len(looked_up),), r + 1.0))
        wanted_grad = (counts / world)[rank * block : (rank + 1) * block, None].expand(-1, 3)
        assert_close(gradient_of(shards[k]), wanted_grad)


def bags_order(strides: list[list[int]], world: int) -> Tensor:
    """(rank, key) bags, key after key."""
    sizes = [strides[r][k] for r in range(world) for k in range(2)]
    begins = dict(zip(product(range(world), range(2)), accumulate(sizes, initial=0), strict=False))
    order = [begins[r, k] + b for k in range(2) for r in range(world) for b in range(strides[r][k])]
    return torch.tensor(order, dtype=torch.int32)


def check_row_wise_kinds() -> None:
    for kind, weighted in product(KINDS, (False, True)):
        check_row_wise(kind, weighted)


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_ids_go_to_the_ranks_of_their_rows_and_rows_come_back_in_the_order_of_the_ids(world: int) -> None:
    run_ranks(world, check_row_wise_kinds)


def check_compressed_rows() -> None:
    rank, world, pg = dist.get_rank(), dist.get_world_size(), world_group()
    module = SequenceEmbeddingsAllToAll(pg, [1] * world, codecs=get_qcomm_codecs(QCommsConfig(CommType.FP16)))
    assert not module.state_dict()
    rows = torch.rand(2 * world, 3) + rank
    received = module(rows, torch.ones(2 * world, dtype=torch.int32), [2] * world, [2] * world).wait()
    assert received.shape == (2 * world, 3)
    assert torch.equal(received, received.half().float())


@pytest.mark.ranks
def test_rows_travel_compressed() -> None:
    run_ranks(2, check_compressed_rows)


def test_a_batch_is_divided_as_its_arguments_say() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([0, 5, 9, 3, 4]), torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([2, 1, 0, 2])
    )
    divided, permute = bucketize_kjt_before_all2all(batch, 2, torch.tensor([5, 4]))
    assert permute is None
    assert divided.keys() == ["a", "b", "a", "b"]
    assert divided.stride() == 2
    assert divided.lengths().tolist() == [1, 0, 0, 1, 1, 1, 0, 1]
    assert divided.values().tolist() == [0, 3, 0, 4, 0]
    assert divided.weights().tolist() == [1, 4, 2, 3, 5]
    divided, permute = bucketize_kjt_before_all2all(
        batch, 2, torch.tensor([5, 4]), output_permute=True, bucketize_pos=True, keep_original_indices=True
    )
    assert permute is not None
    assert divided.values().tolist() == [0, 3, 5, 9, 4]
    assert divided.values()[permute].tolist() == batch.values().tolist()
    assert divided.weights().tolist() == [0, 0, 1, 0, 1]
    uneven = [torch.tensor([0, 1, 10]), torch.tensor([0, 4, 8])]
    divided, _ = bucketize_kjt_before_all2all(batch, 2, torch.tensor([5, 4]), block_bucketize_row_pos=uneven)
    assert divided.values().tolist() == [0, 3, 4, 8, 0]
    divided, _ = bucketize_kjt_before_all2all(batch, 2, torch.tensor([3, 3]), total_num_blocks=torch.tensor([4, 4]))
    assert divided.values().tolist() == [0, 5, 3, 4, 3]
    with pytest.raises(ValueError, match="each of 2 keys, got 1"):
        bucketize_kjt_before_all2all(batch, 2, torch.tensor([5]))


def test_padding_of_a_batch_with_a_capacity_is_in_no_bucket() -> None:
    """Its ids came last, past the lengths, which no batch may have that has no capacity."""
    batch = KeyedJaggedTensor(["a"], torch.tensor([7, 1, 99, 99]), lengths=torch.tensor([1, 1]), capacity=4)
    divided, _ = bucketize_kjt_before_all2all(batch, 2, torch.tensor([5]))
    assert divided.values().tolist() == [1, 2]


def test_a_batch_is_cut_for_the_devices_of_one_process() -> None:
    batch = batch_of(["a", "b", "c"], [bags_of(0, k, 2) for k in range(3)], weighted=True, variable=False)
    parts = KJTOneToAll([1, 2], 2, torch.device("cpu"))(batch)
    assert [part.keys() for part in parts] == [["a"], ["b", "c"]]
    assert kjt_is_equal(KeyedJaggedTensor.concat(parts), batch)
    assert [part.device().type for part in KJTOneToAll([1, 2], 2)(batch)] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="each of 3 devices"):
        KJTOneToAll([1, 2], 3)
    with pytest.raises(ValueError, match="GPUs here"):
        KJTOneToAll([1] * 99, 99, "cuda")


def numbers(tensor: Tensor | None) -> list[int]:
    assert tensor is not None
    return tensor.tolist()


def test_recat_is_key_after_key_in_the_order_of_the_ranks() -> None:
    for keys, ranks, stagger, wanted in (
        (2, 4, 1, [0, 2, 4, 6, 1, 3, 5, 7]),
        (2, 4, 2, [0, 4, 2, 6, 1, 5, 3, 7]),
        (1, 2, 1, [0, 1]),
    ):
        assert numbers(recat(keys, ranks, stagger)) == wanted
    assert recat(0, 4) is None
    assert numbers(recat(2, 2, stride_per_rank=[1, 2])) == [0, 2, 3, 1, 4, 5]


def check_refusals() -> None:
    pg = world_group()
    for words, make in (
        ("one entry for each of 1 ranks", lambda: KJTAllToAll(pg, [1, 1])),
        ("stagger must divide the 1 ranks, got 2", lambda: KJTAllToAll(pg, [1], 2)),
        ("of 2 keys, the batch has", lambda: KJTAllToAll(pg, [2])(batch_of(["a"], [[([1], [1.0])]], False, False))),
        ("features_per_rank", lambda: SequenceEmbeddingsAllToAll(pg, [1, 1])),
    ):
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.ranks
def test_wrong_splits_are_refused() -> None:
    run_ranks(1, check_refusals)
