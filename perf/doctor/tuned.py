"""Tuned configs for the devices here, what is not tuned, and the commands that mend it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from shardwise.kernels import _op, configs

from .findings import NOTE, OK, Finding

# where the command writes to if nothing can be written beside the kernels
OWN_FILE = "~/shardwise_tuned.json"


def tuned(devices: Sequence[str]) -> Iterator[Finding]:
    """Of the CPU path and the kernels of each GPU, and of the planner's constants."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        configs.forget()
        configs._files()
    for warning in warned:
        yield Finding(NOTE, "files", str(warning.message).removeprefix("shardwise: "), "correct it, or remove it")
    for device in devices:
        yield _cpu() if device == "cpu" else _gpu(torch.device(device))
    kind = "cuda" if any(device != "cpu" for device in devices) else "cpu"
    yield Finding(
        NOTE, "planner", "plans go by the data sheet of a preset until `--constants FILE` says otherwise",
        f"shardwise plan calibrate --device {kind} --out constants.json",
    )  # fmt: skip


def _cpu() -> Finding:
    name, threads = configs.cpu_name(), torch.get_num_threads()
    settings = {setting for file in configs._files() if file.device == name for setting, n in file.cpu if n == threads}
    if settings:
        text = f"{len(settings)} of {len(configs.CPU_LIMITS)} settings are tuned for {name} and {threads} threads"
        return Finding(OK, "CPU path", text, data={"settings": sorted(settings)})
    text = f"not tuned for {name} and {threads} thread{'s' * (threads != 1)}: the heuristics serve"
    return Finding(NOTE, "CPU path", text, _command("--device cpu"), {"settings": []})


def _gpu(device: torch.device) -> Finding:
    name, architecture = configs.identity(device)
    subject = f"GPU {device.index}"
    if not _op.HAS_TRITON:
        return Finding(NOTE, subject, "nothing to tune: triton is not installed", "see triton above")
    version = configs.triton_version()
    files = [file for file in configs._files() if file.architecture == architecture]
    own = sum(key.triton == version for file in files if file.device == name for key in file.entries)
    near = sum(key.triton == version for file in files for key in file.entries) - own
    other = sorted({key.triton for file in files for key in file.entries} - {version})
    data = {"entries": own, "entries_of_architecture": near, "other_tritons": other}
    if own:
        return Finding(OK, subject, f"{own} configs are tuned for {name} and triton {version}", data=data)
    text = f"not tuned for {name} and triton {version}: the heuristics serve"
    if near:
        text = f"{near} configs are those of another {architecture}, none of {name}"
    elif other:
        text = f"tuned for triton {', '.join(other)}, not for {version}: the heuristics serve"
    return Finding(NOTE, subject, text, _command(""), data)


def _command(options: str) -> str:
    """What tunes, and keeps what it finds where launches look for it."""
    command = " ".join(f"shardwise kernels autotune {options}".split())
    if _op.TUNED:
        return f"{command} --out {_op.TUNED}" if Path(_op.TUNED).suffix == ".json" else command
    folder = configs.FOLDER if configs.FOLDER.is_dir() else configs.FOLDER.parent
    if os.access(folder, os.W_OK):
        return command
    return f"{command} --out {OWN_FILE}; export SHARDWISE_TUNED={OWN_FILE}"
