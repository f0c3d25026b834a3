"""Writes docs/reference/api/: a page for each part of the library with a `:::` directive for each public name.

    python docs/site/api_pages.py            writes them
    python docs/site/api_pages.py --check    names that no page or a second one has; status 1 if there are any

Public is what stands in `__all__` of shardwise, of its modules `checkpoint`, `quant` and `torchrec`, and of the
packages below it. A name that several of them show has one entry, under the first of its paths; index.md
lists all of them.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

API = Path(__file__).resolve().parents[1] / "reference" / "api"
# in this order, since a name stands under the first that shows it
FACES = (
    *("", "jagged", "embeddings", "models", "data", "planner", "sharding", "checkpoint", "quant", "inference"),
    *("torchrec", "migration.canary", "fbgemm", "fbgemm.tables", "kernels", "kernels.jagged", "kernels.quantized"),
    *("kernels.lookup", "kernels.rows", "kernels.cpu", "embeddings.managed_collision", "embeddings.pools"),
    *("embeddings.pruning", "embeddings.quant", "embeddings.tiers", "sharding.pipeline", "sharding.pools"),
    *("sharding.quant",),
)
# page -> its title, what is said first, and sections: title -> where its names are defined; the longest prefix wins
PAGES: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "jagged": (
        "Jagged batches",
        "Batches of ids of any length, and what is looked up for them: [Jagged batches](../../concepts/jagged.md).",
        {"Types and functions": ("jagged",)},
    ),
    "embeddings": (
        "Tables and collections",
        "Tables of rows and the modules that look rows up in them.",
        {
            "Configs and policies": ("embeddings.config", "embeddings.policy", "kernels.lookup.bounds.BoundsCheckMode"),
            "Collections": ("embeddings.collections",),
            "What collections are built from": ("embeddings", "embeddings.tables"),
            "Ids of any range": ("embeddings.managed_collision",),
            "Pools of rows": ("embeddings.pools",),
            "Pruning in training": ("embeddings.pruning",),
        },
    ),
    "optimizers": (
        "Optimizers",
        "Optimizers of tables, which run inside backward on the rows of a batch, and of dense parameters beside it.",
        {"Classes and functions": ("embeddings.optim",)},
    ),
    "tiers": (
        "Tables larger than the device",
        "Rows in host memory and in files: [Tables larger than the device](../../concepts/tiers.md).",
        {"Around a model": ("sharding.dmp.tiered",), "Stores, caches and policies": ("embeddings.tiers",)},
    ),
    "sharding": (
        "Sharding",
        "Models whose tables are spread over ranks: [Sharding](../../concepts/sharding.md).",
        {
            "Whole models": ("sharding.dmp",),
            "Plans": ("sharding.plan", "planner.layout"),
            "Sharded modules and sharders": ("sharding.modules",),
            "Ranks, exchanges and failures": ("sharding.comms", "sharding.engine", "sharding"),
            "Sharded pools": ("sharding.pools",),
        },
    ),
    "pipelines": (
        "Training loops",
        "Loops that fetch ahead, and several micro-batches as one step: [Pipelines](../../concepts/pipelines.md).",
        {"Classes and functions": ("sharding.pipeline",)},
    ),
    "planner": (
        "Planner",
        "Where tables go, how good that is, and why: [The planner](../../concepts/planner.md).",
        {
            "Plans for models": ("sharding.planning", "planner.constraints", "planner.topology", "planner.errors"),
            "Plans for tables": ("planner",),
            "TorchRec's planner by its names": ("planner.torchrec",),
        },
    ),
    "checkpoint": (
        "Checkpoints",
        "Checkpoints that fit any plan: [Checkpoints](../../howto/checkpoints.md).",
        {"Classes and functions": ("sharding.checkpoint", "checkpoint")},
    ),
    "quant": (
        "Quantized tables",
        "Tables of 8, 4 or 2 bits a value, on one device or sharded over the devices of a process.",
        {"Collections and formats": ("embeddings.quant", "quant"), "Sharded over devices": ("sharding.quant",)},
    ),
    "inference": (
        "Inference",
        "From a trained model to one that serves: [Inference](../../howto/inference.md).",
        {"Classes and functions": ("inference",)},
    ),
    "models": ("Models", "DLRM and its forms, DeepFM, cross networks and their parts.", {"Modules": ("models",)}),
    "data": ("Data", "Batches, generated and read from files.", {"Classes and functions": ("data",)}),
    "migration": (
        "Migration",
        "TorchRec's import paths, and a canary in a live job: [Migration](../../howto/migration.md).",
        {"TorchRec's paths": ("torchrec", "migration"), "Canary": ("migration.canary",)},
    ),
    "fbgemm": (
        "FBGEMM's names",
        "FBGEMM's ops and table classes over our kernels: [FBGEMM's names](../fbgemm.md).",
        {"Ops": ("fbgemm",), "Tables": ("fbgemm.tables",)},
    ),
    "kernels_tables": (
        "Ops on tables",
        "Lookups, fused updates and what checks ids. Shapes and their letters stand in each docstring.",
        {
            "Lookups": ("kernels.lookup",),
            "Updates": ("kernels.update",),
            "Features, rules and settings": ("kernels",),
            "Quantized rows": ("kernels.quantized",),
            "Rows below the device": ("kernels.rows", "kernels.files"),
            "Loops of the CPU": ("kernels.cpu",),
        },
    ),
    "kernels_jagged": (
        "Ops on jagged values",
        "Offsets, padding, permutes, selection, products, buckets and distinct ids.",
        {"Functions": ("kernels.jagged",)},
    ),
}


class Name(NamedTuple):
    """A public name: the path of its entry, all paths that show it, and where it is defined."""

    path: str
    paths: tuple[str, ...]
    home: str


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the pages of docs/reference/api/.")
    parser.add_argument("--check", action="store_true", help="Only say what is missing.")
    if parser.parse_args().check:
        wrong = [*problems()]
        print("\n".join(wrong) or "every public name has its entry")
        sys.exit(bool(wrong))
    for page, text in pages().items():
        (API / f"{page}.md").write_text(text)


def public_names() -> list[Name]:
    """All of them, in the order of FACES and `__all__`."""
    paths: dict[tuple[str, int], list[str]] = {}
    homes: dict[tuple[str, int], str] = {}
    for face in FACES:
        module_name = f"shardwise.{face}".rstrip(".")
        module = import_module(module_name)
        for name in module.__all__:
            if name.startswith("__"):
                continue
            value = getattr(module, name)
            key = (name, id(value))
            paths.setdefault(key, []).append(f"{module_name}.{name}")
            defined = getattr(value, "__module__", None) if callable(value) and not _is_type_alias(value) else None
            homes.setdefault(key, str(defined or module_name).removeprefix("shardwise.") + f".{name}")
    return [Name(found[0], tuple(found), homes[key]) for key, found in paths.items()]


def pages() -> dict[str, str]:
    """The Markdown of each page, index.md apart from none."""
    sections: dict[tuple[str, str], list[Name]] = {}
    names = public_names()
    for name in names:
        sections.setdefault(_section(name.home), []).append(name)
    texts = {}
    for page, (title, first, parts) in PAGES.items():
        text = f"# {title}\n\n{first}\n"
        for part in parts:
            entries = sections.get((page, part), [])
            text += f"\n## {part}\n" + "".join(f"\n::: {name.path}\n" for name in entries) if entries else ""
        texts[page] = text
    return {"index": _index(names), **texts}


def entries() -> list[str]:
    """The path of each `:::` directive in the folder, as often as it is there."""
    return [path for page in sorted(API.glob("*.md")) for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def problems() -> Iterator[str]:
    """A line for each public name without an entry, with two, and for each entry that is of no public name."""
    found, public = entries(), [name.path for name in public_names()]
    for path in public:
        if found.count(path) != 1:
            yield f"{path} has {found.count(path)} entries in docs/reference/api: python docs/site/api_pages.py"
    for path in sorted({*found} - {*public}):
        yield f"{path} has an entry in docs/reference/api and is not public: python docs/site/api_pages.py"


def _section(home: str) -> tuple[str, str]:
    """Page and section of what is defined there."""
    places = {prefix: (page, part) for page, (_, _, parts) in PAGES.items() for part in parts for prefix in parts[part]}
    fitting = [prefix for prefix in places if f"{home}.".startswith(f"{prefix}.")]
    if not fitting:
        raise ValueError(f"no section of PAGES takes what is defined in {home}: add its room to one")
    return places[max(fitting, key=len)]


def _index(names: list[Name]) -> str:
    lines = [
        "# Every public name\n",
        "Names by the module that shows them; each leads to its entry. `from shardwise import NAME` takes those of the",
        "first table, `from shardwise.planner import NAME` those of the planner, and so on.\n",
        "| part | on the page |\n|---|---|",
        *(f"| [{title}]({page}.md) | {', '.join(parts)} |" for page, (title, _, parts) in PAGES.items()),
    ]
    for face in FACES:
        module = f"shardwise.{face}".rstrip(".")
        shown = sorted(
            (path.rpartition(".")[2], name.path)
            for name in names
            for path in name.paths
            if path.rpartition(".")[0] == module
        )
        lines.append(f"\n## {module}\n")
        lines += [f"[`{name}`][{path}]" + ("," if name != shown[-1][0] else "") for name, path in shown]
    return "\n".join(lines) + "\n"


def _is_type_alias(value: object) -> bool:
    return not inspect.isclass(value) and not inspect.isroutine(value) and not hasattr(value, "__wrapped__")


if __name__ == "__main__":
    main()
