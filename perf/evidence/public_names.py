"""Every public name with its signature, as JSON, and what a second list of them lacks: a move must lose none.

    python perf/evidence/public_names.py --write before.json
    python perf/evidence/public_names.py --compare before.json      names that went or changed; status 1 if there are
    any

Listed are `__all__` of every package of shardwise but perf, with the public methods of its classes; every import path
that is served for TorchRec; the commands with their options; the schemas of `torch.ops.shardwise`. The module that
defines a name, and help texts, stand in the list and are not compared: files move, and texts name them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# part -> name -> facts
Names = dict[str, dict[str, dict[str, Any]]]

# an object's address, and where a type is defined
_VARYING = re.compile(r" at 0x[0-9a-f]+|\b(?:shardwise|torch|typing|collections)(?:\.\w+)*\.(?=\w)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Every public name with its signature.")
    parser.add_argument("--write", type=Path, help="Write them to this file.")
    parser.add_argument("--compare", type=Path, help="Say what this earlier file has otherwise.")
    arguments = parser.parse_args()
    if arguments.compare and not arguments.compare.is_file():
        parser.error(f"there is no file {arguments.compare}")
    names = public_names()
    print(", ".join(f"{len(entries)} of {part}" for part, entries in names.items()))
    if arguments.write:
        arguments.write.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n")
    if arguments.compare:
        lines = differences(json.loads(arguments.compare.read_text()), names)
        print("\n".join(lines) or "every name is there as it was")
        sys.exit(1 if any(not line.startswith("new") for line in lines) else 0)


def public_names() -> Names:
    """All of them, by part: packages, torchrec, commands, ops."""
    return {"packages": _packages(), "torchrec": _torchrec(), "commands": _commands(), "ops": _ops()}


def differences(before: Names, now: Names) -> list[str]:
    """A line for each name that went, changed or is new; neither the module of definition nor texts of help count."""
    lines = []
    for part in before.keys() | now.keys():
        old, new = before.get(part, {}), now.get(part, {})
        lines += [f"gone     {part}: {name}" for name in old.keys() - new.keys()]
        lines += [f"new      {part}: {name}" for name in new.keys() - old.keys()]
        for name in old.keys() & new.keys():
            facts = old[name].keys() | new[name].keys()
            changed = sorted(fact for fact in facts - {"module", "help"} if old[name].get(fact) != new[name].get(fact))
            lines += [
                f"changed  {part}: {name}: {fact}: {old[name].get(fact)} -> {new[name].get(fact)}" for fact in changed
            ]
    return sorted(lines)


def _packages() -> dict[str, dict[str, Any]]:
    import shardwise

    entries = {}
    for package in (
        "shardwise",
        *(f"shardwise.{name}" for name in ("checkpoint", "quant", "torchrec")),
        *_below(shardwise),
    ):
        module = import_module(package)
        for name in getattr(module, "__all__", []):
            entries[f"{package}.{name}"] = facts(getattr(module, name))
    return entries


def _below(package: Any) -> list[str]:
    """The packages below it that have an `__all__`, without perf and what is served for others."""
    # those beside it are asked one by one: without the links in shardwise/ no folder lists them
    beside = [import_module(f"{package.__name__}.{name}") for name in package._SUB_PACKAGES]
    names = {
        module.name
        for walked in (package, *beside)
        for module in pkgutil.walk_packages(walked.__path__, f"{walked.__name__}.")
        if module.ispkg
    }.union(each.__name__ for each in beside)
    names = {name for name in names if not name.startswith(("shardwise.perf", "shardwise.served"))}
    return [name for name in sorted(names) if hasattr(import_module(name), "__all__")]


def facts(value: object) -> dict[str, Any]:
    """Kind, module of definition, signature, and of a class the public methods that it or a parent of ours defines."""
    entry: dict[str, Any] = {"kind": type(value).__name__, "module": str(getattr(value, "__module__", ""))}
    if callable(value):
        entry["signature"] = _signature(value)
    elif isinstance(value, (str, int, float, tuple, frozenset)):
        entry["value"] = _VARYING.sub("", repr(value))
    if inspect.isclass(value):
        parents = [parent for parent in value.__mro__ if parent.__module__.startswith("shardwise")]
        methods = {
            name: member for parent in reversed(parents) for name, member in vars(parent).items() if name[:1] != "_"
        }
        entry["members"] = {name: _member(member) for name, member in sorted(methods.items())}
    return entry


def _member(member: object) -> str:
    if isinstance(member, property):
        return "property"
    if isinstance(member, (classmethod, staticmethod)):
        return f"{type(member).__name__} {_signature(member.__func__)}"
    return _signature(member) if callable(member) else type(member).__name__


def _signature(value: Any) -> str:
    try:
        return _VARYING.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "none that Python knows"


def _torchrec() -> dict[str, dict[str, Any]]:
    from shardwise.torchrec import TABLE

    entries = {}
    for path, names in TABLE.items():
        served = import_module(f"shardwise.{path}")
        for name in names:
            entry = facts(getattr(served, name))
            # signatures stand where the name is defined
            entries[f"{path}.{name}"] = {"kind": entry["kind"], "module": entry["module"]}
    return entries


def _commands() -> dict[str, dict[str, Any]]:
    import click

    from shardwise.cli import commands

    entries: dict[str, dict[str, Any]] = {}

    def walk(command: click.Command, path: str) -> None:
        entries[path] = {
            "help": [command.help, *(getattr(param, "help", None) for param in command.params)],
            "options": sorted(map(_option, command.params)),
        }
        if isinstance(command, click.Group):
            # each is loaded when it is asked for
            context = click.Context(command)
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                walk(below, f"{path} {name}")

    walk(commands(), "shardwise")
    return entries


def _option(param: Any) -> str:
    flags = " ".join(flag for flag in ("multiple", "required", "is_flag") if getattr(param, flag, False))
    # that of --jobs is the machine's
    default = "" if "--jobs" in param.opts else param.default
    text = f"{param.param_type_name} {'/'.join(param.opts)} {param.type} {flags} {default}"
    return _VARYING.sub("", text)


def _ops() -> dict[str, dict[str, Any]]:
    import torch

    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("shardwise::")]
    return {f"{schema.name}.{schema.overload_name}".rstrip("."): {"schema": str(schema)} for schema in schemas}


if __name__ == "__main__":
    main()
