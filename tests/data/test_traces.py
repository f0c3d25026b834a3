"""Traces: what is written is read, in either format; what is damaged or is none is refused by name."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.data import Clicks, LookedUp, Trace, TracedTable, TraceWriter, record_trace, traces as format_of_traces

TABLES = (TracedTable("user", 50, 8, "FP32", 64), TracedTable("item", 2**33, 16, "BF16", 128), TracedTable("k", 1, 4))


@pytest.fixture(params=["npz", "parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return tmp_path / f"trace.{request.param}"


def batches(count: int, seed: int = 0) -> list[tuple[int, dict[str, Tensor]]]:
    random.seed(seed)
    made = []
    for _ in range(count):
        ids = {
            table.name: torch.tensor(
                [random.randrange(table.rows) for _ in range(random.choice([0, 1, 30]))], dtype=torch.int64
            )
            for table in TABLES
        }
        made.append((random.randrange(100), ids))
    return made


def write(path: Path, given: list[tuple[int, dict[str, Tensor]]]) -> None:
    with TraceWriter(path, TABLES) as writer:
        for samples, ids in given:
            writer.add(samples, ids)


@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
def test_what_is_written_is_read(path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_of_traces, "_CHUNK_BYTES", chunk)
    given = batches(40)
    write(path, given)
    trace = Trace(path)
    assert trace.tables == TABLES and trace.batches == 40
    assert trace.rows == [sum(ids[table.name].unique().numel() for _, ids in given) for table in TABLES]
    for _ in range(2):
        read = [*trace]
        assert [batch.samples for batch in read] == [samples for samples, _ in given]
        for batch, (_, ids) in zip(read, given, strict=True):
            for table in TABLES:
                assert torch.equal(batch.rows[table.name], ids[table.name].unique())
                assert batch.ids[table.name] == ids[table.name].numel()


def test_a_row_takes_about_two_bytes(path: Path) -> None:
    table = TracedTable("t", 1_000_000, 8)
    generator = torch.Generator().manual_seed(0)
    with TraceWriter(path, [table]) as writer:
        for _ in range(20):
            writer.add(1, {"t": torch.randint(1_000_000, (20_000,), generator=generator)})
    assert path.stat().st_size < 2.2 * Trace(path).rows[0]


def test_an_empty_trace_and_a_table_that_no_batch_has(path: Path) -> None:
    write(path, [])
    assert [*Trace(path)] == []
    write(path, [(3, {})])
    assert [batch.rows["item"].numel() for batch in Trace(path)] == [0]


def test_nothing_is_left_where_writing_fails(path: Path) -> None:
    with (
        pytest.raises(ValueError, match="table 'user': id 50 is none of its 50 rows"),
        TraceWriter(path, TABLES) as writer,
    ):
        writer.add(1, {"user": torch.tensor([3, 50])})
    assert [*path.parent.iterdir()] == []


def test_bytes_that_are_cut_off_or_changed_are_refused(path: Path) -> None:
    """Parquet has no checksums unless asked for: of files with a changed bit one in six was read as other rows."""
    write(path, batches(10))
    whole, right = path.read_bytes(), repr([*Trace(path)])
    random.seed(1)
    for _ in range(60):
        cut = bytearray(whole[: random.randrange(len(whole))] if random.random() < 0.3 else whole)
        for _ in range(random.randint(1, 3)):
            if cut:
                cut[random.randrange(len(cut))] ^= 1 << random.randrange(8)
        path.write_bytes(cut)
        # a changed bit may lie where nothing is; what is read is then whole
        try:
            assert repr([*Trace(path)]) == right
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017


def rewritten(path: Path, name: str, data: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, old in {**members, name: data}.items():
            archive.writestr(member, old)


def array(values: np.ndarray) -> bytes:
    import io

    data = io.BytesIO()
    np.lib.format.write_array(data, values)
    return data.getvalue()


@pytest.mark.parametrize(
    ("member", "data", "text"),
    [
        ("header.json", b"{}", "does not say that it is a shardwise.trace"),
        ("header.json", json.dumps({"format": "shardwise.trace", "version": 9}).encode(), "its version is 9"),
        ("end.json", b'{"batches": 3, "chunks": 1, "rows": [1, 2, 3]}', "and says 3"),
        ("end.json", b'{"batches": 3, "chunks": 99999, "rows": [1, 2, 3]}', "99999 chunks"),
        ("0/0/counts.npy", array(np.array([1, 2])), "counts are not those"),
        ("0/0/deltas.npy", array(np.array([[1]], np.uint16)), "expected uint16"),
        ("0/0/deltas.npy", b"no array", "magic"),
        ("0/0/escapes.npy", array(np.array([7], np.uint32)), "escapes are not those"),
    ],
)
def test_an_archive_with_a_wrong_part_is_refused(tmp_path: Path, member: str, data: bytes, text: str) -> None:
    path = tmp_path / "trace.npz"
    write(path, batches(5))
    rewritten(path, member, data)
    with pytest.raises(ValueError, match=text) as caught:
        list(Trace(path))
    assert str(path) in str(caught.value)


def test_rows_that_leave_their_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    with TraceWriter(path, [TracedTable("t", 50, 8)]) as writer:
        writer.add(1, {"t": torch.tensor([49])})
    header = {"format": "shardwise.trace", "version": 1, "tables": [{"name": "t", "rows": 40, "dim": 8}]}
    rewritten(path, "header.json", json.dumps(header).encode())
    with pytest.raises(ValueError, match="row 49 is none of its 40"):
        list(Trace(path))


def test_other_suffixes_and_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a trace is a file .npz or .parquet, got '.csv'"):
        TraceWriter(tmp_path / "trace.csv", TABLES)
    with pytest.raises(ValueError, match="needs tables"):
        TraceWriter(tmp_path / "trace.npz", [])
    with pytest.raises(FileNotFoundError):
        Trace(tmp_path / "trace.npz")


def model() -> nn.Module:
    config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["a", "b"])
    return nn.Sequential(EmbeddingBagCollection(tables=[config]))


def kjts(count: int) -> Iterator[KeyedJaggedTensor]:
    for n in range(count):
        yield KeyedJaggedTensor(
            keys=["a", "x", "b"], values=torch.tensor([n, n + 1, 9, n]), lengths=torch.tensor([2, 0, 1, 0, 0, 1])
        )


@pytest.mark.parametrize("wrap", [lambda kjt: kjt, lambda kjt: (3, kjt), lambda kjt: {"sparse": [kjt]}])
def test_ids_of_all_features_of_a_table_are_its_rows(path: Path, wrap: Callable[[KeyedJaggedTensor], object]) -> None:
    trace = record_trace((wrap(kjt) for kjt in kjts(4)), model(), path)
    assert [(batch.samples, batch.rows["t"].tolist(), batch.ids["t"]) for batch in trace] == [
        (2, [n, n + 1], 3) for n in range(4)
    ]
    assert trace.tables == (TracedTable("t", 100, 8, "FP32", 64),)


def test_batches_of_ranks_are_merged_into_steps(path: Path) -> None:
    trace = record_trace(kjts(7), model(), path, merge=3)
    assert [batch.rows["t"].tolist() for batch in trace] == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert [batch.samples for batch in record_trace(kjts(7), model(), path, merge=2, most=1)] == [4]


def test_a_loader_of_the_library_is_recorded(tmp_path: Path) -> None:
    clicks = Clicks(0, train_samples=64, evaluate_samples=0)
    tables = [LookedUp(TracedTable(f.name, f.rows, 8), (f.name,)) for f in clicks.features]
    trace = record_trace(clicks.train(16), tables, tmp_path / "trace.npz")
    assert trace.batches == 4 and all(batch.samples == 16 for batch in trace)


def test_a_loader_without_a_step_and_ids_that_are_no_integers_are_refused(path: Path) -> None:
    floats = KeyedJaggedTensor(["a", "b"], torch.ones(2), lengths=torch.tensor([1, 1]))
    for batches, merge, text in (
        ([], 1, "the loader did not give a batch: there is nothing"),
        (kjts(2), 3, "the loader did not give 3 batches, which merge=3 makes a step of"),
        ([floats], 1, "features a, b: ids must be integers, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            record_trace(batches, model(), path, merge=merge)
        assert not path.exists()


def test_a_batch_without_the_features_of_a_table_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"table 't': batch 0 has none of its features a, b: it has no KeyedJagged"):
        record_trace([torch.zeros(3)], model(), path)
    with pytest.raises(ValueError, match="there are no tables"):
        record_trace(kjts(1), nn.Linear(1, 1), path)
    assert not path.exists()
