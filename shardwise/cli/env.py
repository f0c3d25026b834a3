"""`shardwise env`: what an issue should say of where something went wrong. It also runs where torch does not import."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from .._version import __version__, root_of_sources
from .output import json_option, print_json

# beside Python: those that shardwise runs on, then those that it is compared with or that change what it does
PACKAGES = (
    "torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "numpy", "numba", "llvmlite", "scipy", "safetensors",
    "pyarrow", "click", "rich", "tqdm", "libcst", "torchmetrics", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu",
)  # fmt: skip
# what changes how shardwise and torch run begins so, or is one of these
_PREFIXES = (
    "SHARDWISE_", "TORCH", "PYTORCH_", "TRITON_", "NUMBA_", "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "RCCL_", "GLOO_",
    "CUDA_", "HIP_", "ROCR_", "HSA_", "NVIDIA_", "UCX_", "FI_", "LD_PRELOAD", "MALLOC_",
)  # fmt: skip
_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "PYTHONHASHSEED", "NO_COLOR",
    "SLURM_NTASKS", "SLURM_JOB_NUM_NODES",
)  # fmt: skip
# a variable of such a name, or a value that looks like one, may be a secret: it is said that it is set, and no more
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|PRIVATE|APIKEY|(^|_)(KEY|PAT|PWD)(_|$)", re.IGNORECASE
)
_URL_SECRET, _TOKEN = re.compile(r"://[^/\s]*@"), re.compile(r"[A-Za-z0-9_\-+=]{32,}")
HIDDEN = "(set; not shown)"


def add_env(commands: click.Group) -> None:
    """Give a group of commands the command `env`."""

    @commands.command()
    @json_option
    def env(as_json: bool) -> None:
        """What shardwise runs on here: versions, devices, environment; to paste into an issue.

        Nothing is measured and nothing sent. Variables whose name or value may be a secret are named without their
        value, and the home folder is written as ~. `shardwise doctor` says what of it could be better.
        """
        facts = environment()
        if as_json:
            print_json(facts)
        else:
            click.echo("\n".join(_lines(facts)))


def environment() -> dict[str, Any]:
    """All that `shardwise env` tells, as JSON has it."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "shardwise": {"version": __version__, **_installation()},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "os": platform.platform(),
        "packages": packages,
        **_devices(),
        "environment": dict(sorted(_variables(os.environ).items())),
    }


def _installation() -> dict[str, Any]:
    """Whether it is a wheel, an editable install or a checkout, and of sources the commit, if git knows it."""
    from importlib.metadata import PackageNotFoundError, distribution

    editable = False
    try:
        about = distribution("shardwise").read_text("direct_url.json")
        editable = bool(json.loads(about or "{}").get("dir_info", {}).get("editable"))
    except (PackageNotFoundError, ValueError, AttributeError):
        pass
    root = root_of_sources()
    if root is None:
        return {"installed": "wheel", "commit": None, "changed": None}
    commit, changes = _git(root, "rev-parse", "--short=12", "HEAD"), _git(root, "status", "--porcelain")
    return {
        "installed": "editable" if editable else "sources",
        "commit": commit or None,
        "changed": bool(changes) if commit else None,
    }


def _git(root: Path, *arguments: str) -> str:
    # a folder within somebody else's repository is no commit of shardwise
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _devices() -> dict[str, Any]:
    """The CPU, the GPUs and what torch was built for; what torch does not say is left out where it does not import."""
    from ..perf.doctor.versions import amd_driver, nvidia_driver, torch_or_error

    torch, error = torch_or_error()
    facts: dict[str, Any] = {"cpu": _cpu(torch), "driver": nvidia_driver() or amd_driver() or None}
    if torch is None:
        return {"torch_error": error, **facts, "gpus": []}
    facts["torch"] = {
        "cuda": torch.version.cuda, "hip": torch.version.hip, "git": getattr(torch.version, "git_version", None),
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None, "nccl": _nccl(torch),
    }  # fmt: skip
    return {**facts, "gpus": [*_gpus(torch)]}


def _cpu(torch: Any) -> dict[str, Any]:
    from ..perf.doctor.versions import cores

    name = platform.processor() or platform.machine()
    try:
        named = re.search(
            r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        name = named[1].strip() if named else name
    except OSError:
        pass
    capability = torch.backends.cpu.get_cpu_capability() if torch is not None else None
    return {
        "name": name, "machine": platform.machine(), "cores": cores(), "capability": capability,
        "threads": torch.get_num_threads() if torch is not None else None,
    }  # fmt: skip


def _gpus(torch: Any) -> Iterator[dict[str, Any]]:
    """Name, architecture and memory of each that torch can use."""
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        architecture = gpu.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
        yield {"name": gpu.name, "architecture": architecture, "memory_gib": round(gpu.total_memory / 2**30, 1)}


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    except (RuntimeError, AttributeError):
        return None


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how shardwise and torch run, without what may be a secret."""
    home = str(Path.home())
    variables = {}
    for name, value in environment.items():
        if not value or not (name in _NAMES or name.startswith(_PREFIXES)):
            continue
        # of a path each part is looked at: a long one of short words is no secret
        parts = re.split(r"[:/,;\s]+", value)
        hidden = _SECRET_NAME.search(name) or _URL_SECRET.search(value) or any(map(_TOKEN.fullmatch, parts))
        plain = value.replace(home, "~") if len(home) > 1 else value
        variables[name] = HIDDEN if hidden else "".join(letter if letter.isprintable() else "?" for letter in plain)
    return variables


def _lines(facts: Mapping[str, Any]) -> list[str]:
    """A name and what is so, line by line."""
    package, python, cpu = facts["shardwise"], facts["python"], facts["cpu"]
    kind = package["installed"]
    if package["commit"]:
        kind += f", commit {package['commit']}" + (
            ", with changes that are not committed" if package["changed"] else ""
        )
    rows = [
        ("shardwise", f"{package['version']} ({kind})"),
        ("Python", f"{python['version']} ({python['implementation']})"),
        ("OS", facts["os"]),
    ]
    for name, version in facts["packages"].items():
        built = ""
        if name == "torch" and "torch" in facts:
            build = facts["torch"]
            built = (
                f" (CUDA {build['cuda']})" if build["cuda"] else f" (ROCm {build['hip']})" if build["hip"] else " (CPU)"
            )
        rows.append((name, f"{version}{built}"))
    if "torch_error" in facts:
        rows.append(("torch", f"does not import: {facts['torch_error']}"))
    more = [f"{cpu['cores']} cores"]
    more += [f"{cpu['threads']} threads of torch", cpu["capability"]] if cpu["threads"] else []
    rows.append(("CPU", f"{cpu['name']} ({cpu['machine']}; {', '.join(more)})"))
    rows.append(("driver", facts["driver"] or "none of a GPU"))
    for index, gpu in enumerate(facts["gpus"]):
        rows.append((f"GPU {index}", f"{gpu['name']} ({gpu['architecture']}, {gpu['memory_gib']} GiB)"))
    if not facts["gpus"]:
        rows.append(("GPU", "none that torch can use"))
    if facts.get("torch") and facts["torch"]["nccl"]:
        rows.append(("NCCL", facts["torch"]["nccl"]))
    rows += facts["environment"].items() or [("variables", "none that matter are set")]
    margin = max(len(name) for name, _ in rows if len(name) <= 24) + 2
    return [f"{name.ljust(margin - 1)} {text}" for name, text in rows]
