"""`shardwise env`: what an issue should say, without what is nobody's business, also where torch does not import."""

from __future__ import annotations

import pytest

pytest.importorskip("click")

import json
import platform
from pathlib import Path

import torch
from checkout import run_python
from click.testing import CliRunner, Result

from shardwise import __version__, cli
from shardwise.cli.env import HIDDEN, _variables


def run_env(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), ["env", *arguments])


def test_text_and_json_say_the_same() -> None:
    text, document = run_env(), run_env("--json")
    assert text.exit_code == document.exit_code == 0 and text.stderr == document.stderr == ""
    environment = json.loads(document.stdout)
    lines = dict(line.split(maxsplit=1) for line in text.stdout.splitlines() if not line.startswith("GPU "))
    assert environment["shardwise"]["version"] == __version__ and lines["shardwise"].startswith(f"{__version__} (")
    assert environment["python"]["version"] == platform.python_version() and lines["Python"].startswith(
        platform.python_version()
    )
    assert environment["packages"]["torch"] in lines["torch"] and environment["torch"]["cuda"] == torch.version.cuda
    assert {name: lines[name].split()[0] for name in environment["packages"]} == environment["packages"]
    assert len(environment["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    # in a checkout the commit can be named, so that the sources can be had
    assert environment["shardwise"]["installed"] in ("editable", "sources", "wheel")


def test_variables_that_matter_are_told_and_secrets_only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    given = {
        "OMP_NUM_THREADS": "2", "SHARDWISE_NUMBA": "0", "NCCL_DEBUG": "INFO", "TRITON_CACHE_DIR": f"{home}/cache",
        "LOCAL_RANK": "3", "TORCH_LOGS": "", "PATH": "/bin", "HF_TOKEN": "hf_x", "TORCHELASTIC_AUTH": "abc",
        "NCCL_API_KEY": "k", "TORCH_HUB": "https://me:pass@example.org/x",
        "SHARDWISE_X": "ghp_0123456789abcdefghij0123456789abcdef", "CUDA_MODULE_LOADING": "LAZY", "NCCL_IB_PKEY": "0",
        "TORCH_TRACE": "a\x1b[31m",
    }  # fmt: skip
    assert _variables(given) == {
        "OMP_NUM_THREADS": "2", "SHARDWISE_NUMBA": "0", "NCCL_DEBUG": "INFO", "TRITON_CACHE_DIR": "~/cache",
        "LOCAL_RANK": "3", "TORCHELASTIC_AUTH": HIDDEN, "NCCL_API_KEY": HIDDEN, "TORCH_HUB": HIDDEN,
        "SHARDWISE_X": HIDDEN, "CUDA_MODULE_LOADING": "LAZY", "NCCL_IB_PKEY": "0", "TORCH_TRACE": "a?[31m",
    }  # fmt: skip
    monkeypatch.setenv("NCCL_SECRET", "do not print me")
    printed = run_env().stdout + run_env("--json").stdout
    assert "do not print me" not in printed and printed.count(HIDDEN) >= 2


def test_a_torch_that_does_not_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['env']\n"
        "from shardwise.cli import main\nmain()"
    )
    printed = run_python("-c", code).stdout
    assert "does not import: OSError: libcudart.so.12" in printed and printed.startswith("shardwise ")


def test_nothing_but_torch_is_imported_to_tell() -> None:
    code = (
        "import sys; sys.argv[1:] = ['env', '--json']\n"
        "from shardwise.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('numba', 'triton', 'rich') if name in sys.modules], file=sys.stderr)"
    )
    assert run_python("-c", code).stderr.strip().splitlines()[-1] == "[]"
