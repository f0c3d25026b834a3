"""Keys and types of what commands print with `--json`, and of the files that they and the library write.

Each command runs in this process on the smallest input that shows its keys. A key that the input gives its name (a
table, a rank) stands as the input has it; of a list the keys are those of any of its items.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from shardwise import cli

PROGRAM = """
import torch
from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowWiseAdagrad
from shardwise import apply_optimizer_in_backward
from shardwise.inference import Signature

def make():
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(40 - 28 * n, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(2)]
    model = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    return model

def served():
    return make(), Signature(["f0", "f1"])

def batches():
    for n in range(3):
        yield KeyedJaggedTensor(["f0", "f1"], torch.arange(10) + n, lengths=torch.ones(10, dtype=torch.int64))
"""
TABLES = [
    {"name": f"t{n}", "num_embeddings": rows, "embedding_dim": 8, "features": [f"f{n}"]}
    for n, rows in enumerate((40, 12))
]
# what is asked; names of files are those that `prepared` or a command before has written
COMMANDS = {
    "plan": "plan --tables tables.json --world-size 2 --hbm 1GiB --batch-size 16 --out plan.json",
    "plan explain": "plan explain plan.json",
    "plan whatif": "plan whatif plan.json --batch-size 32",
    "plan diff": "plan diff plan.json other.json",
    "ckpt show": "ckpt show a",
    "ckpt verify": "ckpt verify a",
    "ckpt diff": "ckpt diff a b",
    "ckpt reshard": "ckpt reshard a c --plan row_wise --world-size 2",
    "ckpt export": "ckpt export a a.safetensors",
    "export": "export served --model program.py:served",
    "cache record": "cache record trace.npz --loader program.py:batches --model program.py:make",
    "cache simulate": "cache simulate trace.npz --slots 10",
    "migrate": "migrate old.py",
    "perf run": "perf run --only ^jagged:.complete_cumsum --small --laps 1 --out a.json",
    "perf report": "perf report a.json",
    "perf compare": "perf compare a.json a.json",
    "env": "env",
    "doctor": "doctor --quick --device cpu",
}
# what is wrong, and ends with its status
REFUSED = {
    "a file that is not there": "plan explain nothing.json",
    "an option that there is not": "env --nothing",
    "a number out of its range": "plan --tables tables.json --world-size 0",
    "a file of another kind": "plan explain tables.json",
    "tables that find no room": "plan --tables tables.json --world-size 2 --hbm 1KiB",
    "a checkpoint with a file cut off": "ckpt verify broken",
}
# of these the values are the machine's: keys alone are promised
MACHINE = {"doctor", "env", "perf compare", "perf run", "perf report"}
# what lies below names libraries, devices, settings and laps: a machine has some and another has others
VARYING = re.compile(
    r"^(environment|packages|gpus|driver|machine_info|commit_info)(?=\.|\[)"
    r"|\.(data|laps|machine|medians|ratios|beside|notes)\b(?=\.|\[)"
)
# beside a checkout alone: what they compile, execute and count is in no wheel
UNPROMISED = {"kernels autotune", "kernels check", "kernels registers", "kernels run", "perf counts", "plan calibrate"}


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """The folder as the current one, with what the commands read."""
    import torch

    from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, checkpoint

    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("program.py").write_text(PROGRAM)
        Path("old.py").write_text("from torchrec import KeyedJaggedTensor, nothing_like_it\n")
        Path("tables.json").write_text(json.dumps(TABLES))
        for name, value in (("a", 1.0), ("b", 2.0)):
            model = EmbeddingBagCollection([EmbeddingBagConfig(40, 8, "t0", feature_names=["f0"])])
            torch.nn.init.constant_(next(iter(model.parameters())), value)
            checkpoint.save(name, model, step=1).wait()
        shutil.copytree("b", "broken")
        for path in Path("broken").rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
        _invoke("plan --tables tables.json --world-size 1 --hbm 1GiB --batch-size 16 --out other.json")
        yield
    finally:
        os.chdir(before)


def _invoke(words: str) -> tuple[Any, int]:
    """What a command prints, and its status."""
    result = CliRunner().invoke(cli.commands(), [*words.split(), "--json"])
    # on a machine that is busy `perf compare` ends with 2, having printed what it found
    if not result.stdout.strip().startswith(("{", "[")):
        raise AssertionError(f"shardwise {words} --json ended with {result.exit_code}: {result.output.strip()}")
    return json.loads(result.stdout), result.exit_code


def outputs(*, without: Collection[str] = ()) -> dict[str, Any]:
    """Of each command the keys of what it prints; `prepared` goes around it, and `COMMANDS` is in order."""
    found: dict[str, Any] = {}
    for name, words in COMMANDS.items():
        if name not in without:
            try:
                document, status = _invoke(words)
            except AssertionError as error:
                # a difference like others: it is told beside those of the command's options
                found[name] = {"kind": f"failure ({error})"}
                continue
            promised = {} if name in MACHINE else {"status": str(status)}
            found[name] = {"kind": "document", "keys": keys_of(document, types=name not in MACHINE), **promised}
    runs = {what: CliRunner().invoke(cli.commands(), words.split()) for what, words in REFUSED.items()}
    found["exit status"] = {"kind": "statuses", "keys": {what: str(run.exit_code) for what, run in runs.items()}}
    return dict(sorted(found.items()))


def files() -> dict[str, Any]:
    """Of each format the names of its files and the keys of those that are JSON, after `outputs` wrote them."""
    from shardwise.planner.constants_measured import CARDS

    CARDS["cpu"].constants.save("constants.json")
    found = {
        "checkpoint": _folder(Path("a")),
        "exported model": _folder(Path("served")),
        "plan": keys_of(json.loads(Path("plan.json").read_text())),
        "planner constants": keys_of(json.loads(Path("constants.json").read_text())),
        "trace": _zip(Path("trace.npz")),
        "exported checkpoint": dict(_tensors(Path("a.safetensors"), "")),
    }
    return {name: {"kind": "file", "keys": keys} for name, keys in found.items()}


def _folder(folder: Path) -> dict[str, str]:
    """Names of files, and keys of JSON and of safetensors as "file: key"."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        found[name] = "file"
        if path.suffix == ".json":
            found |= {f"{name}: {key}": kind for key, kind in keys_of(json.loads(path.read_text())).items()}
        elif path.suffix == ".safetensors":
            found |= _tensors(path, f"{name}: ")
    return found


def _tensors(path: Path, before: str) -> dict[str, str]:
    """Names of what a safetensors file has, with dtype and shape."""
    tensors = {key: value for key, value in header(path).items() if key != "__metadata__"}
    return {f"{before}{key}": f"{value['dtype']} {value['shape']}" for key, value in tensors.items()}


def header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, read without the library."""
    data = path.read_bytes()
    content: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return content


def _zip(path: Path) -> dict[str, str]:
    found = {}
    with zipfile.ZipFile(path) as opened:
        for name in sorted(opened.namelist()):
            found[name] = "file"
            if name.endswith(".json"):
                found |= {f"{name}: {key}": kind for key, kind in keys_of(json.loads(opened.read(name))).items()}
    return found


def keys_of(document: Any, *, types: bool = True) -> dict[str, str]:
    """Path of each value and what it is: "plan.t0.ranks[]": "integer"."""
    found: dict[str, set[str]] = {}
    _walk("", document, found)
    told = {path: kinds for path, kinds in sorted(found.items()) if types or not VARYING.search(path)}
    return {path or ".": " or ".join(sorted(kinds)) if types else "anything" for path, kinds in told.items()}


def _walk(path: str, value: Any, found: dict[str, set[str]]) -> None:
    if isinstance(value, Mapping):
        found.setdefault(path, set()).add("object")
        for key, item in value.items():
            _walk(f"{path}.{key}" if path else str(key), item, found)
    elif isinstance(value, list):
        found.setdefault(path, set()).add("list")
        for item in value:
            _walk(f"{path}[]", item, found)
    else:
        kind = {bool: "true or false", int: "number", float: "number", str: "text", type(None): "null"}[type(value)]
        found.setdefault(path, set()).add(kind)
