"""The DLRM example learns, trains the same at one rank and at two, explains itself; with int8 tables it is as good.

Takes 25 s: the example trains on one rank and on two.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT, run_python
from ranks import run_ranks
from torch import nn

import shardwise
from shardwise import DLRM, Batch, checkpoint
from shardwise.data import Clicks
from shardwise.inference import load_program, quantize_inference_model, read_tables
from shardwise.models import auc

FOLDER = Path(os.environ.get("SHARDWISE_DATA", ROOT.parent / "shared" / "data"))
MOVIELENS, CRITEO = FOLDER / "ml_latest_small", FOLDER / "criteo_1tb_sample"


def needs(folder: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not folder.is_dir(), reason=f"no {folder.name} below $SHARDWISE_DATA or ../shared/data")


def example(name: str = "train") -> Any:
    """A module of the example, which finds the files beside it as it does when it is run."""
    folder = str(ROOT / "examples" / "dlrm")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def train(*argv: str) -> dict[str, Any]:
    result: dict[str, Any] = example().main([*argv, "--device", "cpu"])
    return result


def measured(result: dict[str, Any]) -> list[float]:
    return [epoch[name] for epoch in result["epochs"] for name in ("train_loss", "test_auc", "test_ne")]


def test_the_whole_plan_is_for_this_run_s_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan was for 512 samples of one id for each feature, and "proven to be optimal" for those."""
    train(*CLICKS, "--steps", "1", "--epochs", "1", "--explain")
    printed = capsys.readouterr().out
    assert "256 samples a rank" in printed and "is the default" not in printed and "is assumed" not in printed
    words, history = (re.search(rf"{name}: .* ([\d.]+) ids? a sample", printed) for name in ("t_words", "t_history"))
    assert words and history and (words[1], history[1]) == ("6.5", "15")


CLICKS = ("--epochs", "2", "--steps", "30", "--batch-size", "256", "--dim", "8")


def test_rows_in_a_file_change_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    where = ("--tier", "file", "--tier-folder", str(tmp_path / "rows"), "--pipeline", "prefetch")
    page = tmp_path / "run.html"
    tiered = train(*CLICKS, *where, "--metrics", str(metrics), "--log-every", "10", "--page", str(page))
    printed = capsys.readouterr().out
    assert re.search(
        r"rows below the device, on rank 0:\n  user: [\d,]+ slots of 20,000 rows over file, hit rate", printed
    )
    rates = [line["hit_rate"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert len(rates) == 6 and min(rates) > 0 and max(rates) <= 1
    assert "Rows below the device" in page.read_text()
    assert {cache["below"] for cache in tiered["caches"].values()} == {"file"}
    assert measured(tiered) == measured(train(*CLICKS))


@pytest.mark.parametrize(
    ("optimizer", "lr"), [("sgd", "0.5"), ("adagrad", "0.05"), ("rowwise_adagrad", "0.05"), ("adam", "0.01")]
)
def test_training_on_generated_clicks_learns_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str, lr: str
) -> None:
    result = train(
        *CLICKS, "--optimizer", optimizer, "--lr", lr, "--json", str(tmp_path / "runs" / "1" / "result.json")
    )
    epochs = result["epochs"]
    assert [epoch["steps"] for epoch in epochs] == [30, 30]
    assert 0.6 < epochs[-1]["test_auc"] < result["ceiling_auc"] + 0.01
    assert epochs[-1]["test_ne"] < 1.0
    written = json.loads((tmp_path / "runs" / "1" / "result.json").read_text())
    assert written["config"]["optimizer"] == optimizer
    assert written["epochs"] == epochs
    assert written["versions"]["shardwise"] == shardwise.__version__
    printed = capsys.readouterr().out
    # the plan in three lines, the table of epochs, the ceiling
    plan = printed.split("plan: ")[1].splitlines()[:3]
    assert plan[1].startswith("  a step takes ") and plan[2].startswith("  rank 0: ") and "words" in plan[2]
    assert "for 256 samples a rank with 25.5 ids each" in printed and "Tables, most work first" not in printed
    assert f"{epochs[1]['test_auc']:.4f}" in printed
    assert f"{result['ceiling_auc']:.4f}" in printed


@pytest.mark.ranks
def test_two_ranks_train_as_one_does() -> None:
    first, second = run_ranks(2, train, *CLICKS)
    assert measured(first) == measured(second)
    (alone,) = run_ranks(1, train, *CLICKS)
    assert measured(first) == pytest.approx(measured(alone), abs=2e-4)


@pytest.mark.ranks
@needs(MOVIELENS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_movielens_reaches_an_auc_of_79_in_an_epoch(world_size: int) -> None:
    result = run_ranks(world_size, train, "--data", str(MOVIELENS), "--epochs", "1")[0]
    assert result["epochs"][0]["test_auc"] > 0.79


class Twin(nn.Module):
    """The example's model in plain torch, with the weights of another: one nn.EmbeddingBag a table."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        bags = model.sparse_arch.embedding_bag_collection.embedding_bags
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(bag.weight.detach().clone(), freeze=False, mode="mean")  # type: ignore[attr-defined]
            for bag in bags.children()  # type: ignore[union-attr]
        )
        self.bottom, self.top = (
            nn.ModuleList(copy.deepcopy(layer) for layer in arch.modules() if isinstance(layer, nn.Linear))
            for arch in (model.dense_arch, model.over_arch)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        x = batch.dense_features
        for layer in self.bottom:
            x = layer(x).relu()
        kjt = batch.sparse_features
        bags = kjt.to_dict().values()
        rows = [table(bag.values(), bag.offsets()[:-1]) for table, bag in zip(self.tables, bags, strict=True)]
        vectors = torch.stack([x, *rows], dim=1)
        pairs = itertools.combinations(vectors.unbind(1), 2)
        y = torch.cat([x, *((a * b).sum(1, keepdim=True) for a, b in pairs)], dim=1)
        for layer in self.top[:-1]:
            y = layer(y).relu()
        return self.top[-1](y).squeeze(1)


def train_with_twin() -> tuple[float, float, float]:
    """One epoch of the example and of its twin: the AUC of both, and how far their losses were apart at most."""
    training, model = example("training"), example("model")
    args = example("arguments").parse("", ["--data", str(MOVIELENS), "--device", "cpu"])
    source, device = training.open_source(args), torch.device("cpu")
    dmp = model.build_model(source, args, device)
    optimizer = model.build_optimizer(dmp, args)
    twin = Twin(dmp.module.model)
    # eps as in the fused optimizer for the tables, as torch's default for the dense layers
    dense = [*twin.bottom.parameters(), *twin.top.parameters()]
    groups: list[dict[str, Any]] = [{"params": twin.tables.parameters(), "eps": 1e-8}, {"params": dense}]
    plain = torch.optim.Adagrad(groups, lr=args.lr)
    apart = 0.0
    for batch in source.train(args.batch_size):
        loss, _ = dmp(batch)
        other = nn.functional.binary_cross_entropy_with_logits(twin(batch), batch.labels)
        for its_optimizer, its_loss in ((optimizer, loss), (plain, other)):
            its_optimizer.zero_grad()
            its_loss.backward()
            its_optimizer.step()
        apart = max(apart, abs(float(loss - other)))
    scores = training.evaluate(dmp, source.evaluate(args.batch_size), device)
    with torch.no_grad():
        others = torch.cat([twin(batch) for batch in source.evaluate(args.batch_size)])
    labels = torch.cat([batch.labels for batch in source.evaluate(args.batch_size)])
    return scores.auc, auc(others, labels), apart


@pytest.mark.ranks
@needs(MOVIELENS)
def test_movielens_trains_as_a_plain_torch_twin_does() -> None:
    ((own_auc, wanted, apart),) = run_ranks(1, train_with_twin)
    assert wanted > 0.79
    assert own_auc == pytest.approx(wanted, abs=0.005)
    assert apart < 1e-3


@pytest.mark.ranks
@needs(CRITEO)
def test_criteo_rows_stream_through_training_on_two_ranks(tmp_path: Path) -> None:
    argv = ("--data", str(CRITEO), "--epochs", "2", "--batch-size", "64", "--dim", "8", "--json", str(tmp_path / "r"))
    first, second = run_ranks(2, train, *argv)
    # 900 of 1,000 rows are trained on
    assert [epoch["steps"] for epoch in first["epochs"]] == [14, 14]
    assert measured(first) == measured(second)
    assert all(math.isfinite(number) for number in measured(first))
    losses = [epoch["train_loss"] for epoch in first["epochs"]]
    assert losses[1] < losses[0]
    assert json.loads((tmp_path / "r").read_text())["world_size"] == 2


def test_bad_rows_are_skipped_and_counted_on_demand(tmp_path: Path) -> None:
    good = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))])
    (tmp_path / "day_0.tsv").write_text("\n".join([good, "bad", *[good] * 18]) + "\n")
    argv = ("--data", str(tmp_path), "--epochs", "1", "--batch-size", "6", "--dim", "4")
    with pytest.raises(SystemExit, match=r'^train\.py: .*day_0\.tsv:2: 1 columns, expected 40; .*on_bad_row="skip"'):
        train(*argv)
    assert train(*argv, "--on-bad-row", "skip")["skipped_rows"] == {"wrong number of columns": 1}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "{}"], "no data that shardwise reads"),
        (["--data", "{}/nowhere"], "no such folder"),
        (["--batch-size", "0"], "--batch-size must be positive, got 0"),
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--lr", "0"], "--lr must be positive and finite, got 0.0"),
        (["--lr", "nan"], "--lr must be positive and finite, got nan"),
        (["--lr", "inf"], "--lr must be positive and finite, got inf"),
        (["--json", "{}"], "is a folder, name a file"),
        (["--metrics", "{}"], "--metrics {} is a folder, name a file"),
        (["--log-every", "0"], "--log-every must be positive, got 0"),
        (["--checkpoint-dir", "{}/c", "--checkpoint-every", "0"], "--checkpoint-every must be positive, got 0"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint-dir"),
        (["--checkpoint-async"], "--checkpoint-async needs --checkpoint-dir"),
        (["--resume"], "--resume needs --checkpoint-dir"),
        (["--json", "{}/a_file/result.json"], "File exists"),
        (
            ["--checkpoint-dir", "s3:/bucket/run"],
            "--checkpoint-dir s3:/bucket/run: a URL has two slashes, s3://bucket/run",
        ),
        (["--checkpoint-dir", "{}/a_file"], "--checkpoint-dir {}/a_file: [Errno 17] File exists"),
        (["--export", "{}/a_file/served"], "--export {}/a_file/served: [Errno 17] File exists"),
        (["--batch-size", "1000000"], "do not fill a batch of 1000000"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(SystemExit) as stopped:
        train(*(part.format(tmp_path) for part in argv))
    assert message.format(tmp_path) in str(stopped.value) + capsys.readouterr().err


def test_cuda_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^train\.py: --device cuda: torch finds no CUDA device here"):
        example().main(["--device", "cuda"])


def test_the_folder_of_the_results_is_made_before_training(tmp_path: Path) -> None:
    """After hours of training, write_text raised FileNotFoundError for the missing folder and the results were lost."""
    example("arguments").parse("", ["--device", "cpu", "--json", str(tmp_path / "runs" / "1" / "result.json")])
    assert (tmp_path / "runs" / "1").is_dir()


def test_an_error_of_training_is_not_taken_for_the_readers() -> None:
    with pytest.raises(ValueError, match="of the model"):
        for _ in example("evaluation").read(iter([None])):
            raise ValueError("of the model")


def test_a_batch_that_the_ranks_cannot_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        example("arguments").parse("", ["--batch-size", "512"])
    assert "--batch-size 512 cannot be shared equally by 3 ranks" in capsys.readouterr().err


SMALL = ("--epochs", "1", "--steps", "60", "--batch-size", "512")
FRESH = """
import sys, torch
from shardwise.inference import load_program
program = load_program(sys.argv[1])
torch.save([program(**batch) for batch in torch.load(sys.argv[2])], sys.argv[3])
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("shardwise.")}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a run on two ranks says, and the folder with `model` and `checkpoints`."""
    folder = tmp_path_factory.mktemp("dlrm")
    options = ("--export", str(folder / "model"), "--checkpoint-dir", str(folder / "checkpoints"))
    first, second = run_ranks(2, train, *SMALL, *options)
    assert first["int8"] == second["int8"]
    return first, folder


@pytest.mark.ranks
def test_int8_tables_are_a_quarter_of_the_size_and_as_good(trained: tuple[dict[str, Any], Path]) -> None:
    result, _ = trained
    assert result["epochs"][-1]["test_auc"] > 0.6
    assert abs(result["int8"]["test_auc"] - result["epochs"][-1]["test_auc"]) < 0.002
    assert result["int8"]["fp32_table_bytes"] == 4 * 32 * sum(Clicks().feature_rows.values())
    assert result["int8"]["ratio"] > 3.5


@pytest.mark.full
@pytest.mark.ranks
def test_the_exported_model_is_served_without_the_training_parts(
    trained: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, folder = trained
    batches = list(Clicks().evaluate(4096))
    inputs = [
        {
            "values": batch.sparse_features.values(),
            "lengths": batch.sparse_features.lengths(),
            "dense": batch.dense_features,
        }
        for batch in batches
    ]
    torch.save(inputs, tmp_path / "batches")
    done = run_python("-c", FRESH, folder / "model", tmp_path / "batches", tmp_path / "found")
    assert done.stdout.split() == ["_version", "errors", "inference", "kernels", "untrusted"]

    answers = torch.load(tmp_path / "found")
    logits = torch.cat([answer["logit"] for answer in answers])
    labels = torch.cat([batch.labels for batch in batches])
    assert auc(logits, labels) == pytest.approx(result["int8"]["test_auc"], abs=1e-6)
    model = of_the_checkpoint(folder / "checkpoints")
    with torch.no_grad():
        wanted = torch.cat([model(batch)[1][1] for batch in batches])
    assert torch.equal(logits, wanted)
    assert torch.equal(torch.cat([answer["click_probability"] for answer in answers]), torch.sigmoid(wanted))


def of_the_checkpoint(folder: Path) -> torch.nn.Module:
    """The model that `shardwise export` would make of the newest checkpoint, int8."""
    example()
    path = checkpoint.latest(folder)
    assert path is not None
    model, _, _ = example("serving").from_checkpoint(checkpoint.read_manifest(path))
    model.load_state_dict(checkpoint.full_state_dict(path))
    return quantize_inference_model(model)


@pytest.mark.ranks
def test_a_checkpoint_exports_to_the_same_files(trained: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    pytest.importorskip("rich")
    from click.testing import CliRunner

    from shardwise import cli

    _, folder = trained
    factory = ROOT / "examples" / "dlrm" / "serving.py"
    arguments = [str(tmp_path / "out"), "--model", f"{factory}:from_checkpoint", "--checkpoint"]
    result = CliRunner().invoke(cli.commands(), ["export", *arguments, str(folder / "checkpoints")])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-3].split()[-1] == "3.56x"
    from_checkpoint, from_training = (path / "tables.safetensors" for path in (tmp_path / "out", folder / "model"))
    assert from_checkpoint.read_bytes() == from_training.read_bytes()
    assert load_program(tmp_path / "out").facts.features == load_program(folder / "model").facts.features


@pytest.mark.ranks
def test_numpy_alone_finds_the_rows_of_the_checkpoint(trained: tuple[dict[str, Any], Path]) -> None:
    _, folder = trained
    path = checkpoint.latest(folder / "checkpoints")
    assert path is not None
    weights = checkpoint.full_state_dict(path)
    for name, table in read_tables(folder / "model").items():
        whole = weights[f"model.sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight"]
        # half a step of the row's 255, and what fp16 scales lose
        bound = (whole.amax(1) - whole.amin(1)).max() / 255 * 0.75
        assert (torch.from_numpy(table.rows(range(len(whole)))) - whole).abs().max() < bound


def test_a_folder_that_may_not_be_replaced_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit, match="--export: .* is there and is no exported model"):
        train(*SMALL, "--export", str(tmp_path))
