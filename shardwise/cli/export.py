"""`shardwise export`: from a model and a checkpoint to a folder that serves, its tables quantized."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .._names import did_you_mean
from .factory import factory_named, failed
from .output import Place, json_option, load_torch, one_line, print_json, print_table, show, spinner, table_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..checkpoint import Manifest
    from ..inference import ModelFacts, Signature

_DTYPES = {
    "int8": "int8",
    "int4": "quint4x2",
    "int2": "quint2x4",
    "fp8": "float8_e4m3fn",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}
_OUTPUTS = ("fp32", "fp16", "bf16")


class _Made(NamedTuple):
    """What a factory gave."""

    model: nn.Module
    signature: Signature | None
    call: Callable[..., Any] | None = None


def add_export(commands: click.Group) -> None:
    """Give a group of commands the command `export`."""
    there = Place(exists=True)

    @commands.command()
    @click.argument("folder", metavar="OUT_DIR", type=click.Path(file_okay=False, path_type=Path))
    @click.option(
        "--model", "factory", required=True, metavar="MODULE:FACTORY", help="A function; FILE.py:FACTORY too."
    )
    @click.option("--checkpoint", type=there, help="A step folder, or a folder of them: the newest good one is taken.")
    @click.option("--dtype", type=click.Choice([*_DTYPES]), default="int8", help="Of all tables.", show_default=True)
    @click.option("--table-dtype", "exceptions", multiple=True, metavar="TABLE=DTYPE", help="Of one; may repeat.")
    @click.option("--output-dtype", type=click.Choice(_OUTPUTS), default="fp32", help="Of lookups.", show_default=True)
    @click.option("--aoti", is_flag=True, help="Also compile it ahead of time, for this machine's processor.")
    @click.option("--force", is_flag=True, help="Replace the model that is in OUT_DIR.")
    @json_option
    def export(
        folder: Path,
        factory: str,
        checkpoint: Path | None,
        dtype: str,
        exceptions: tuple[str, ...],
        output_dtype: str,
        aoti: bool,
        force: bool,
        as_json: bool,
    ) -> None:
        """Quantize a model's tables and write it into the folder OUT_DIR, which serves it.

        FACTORY returns the float model on the CPU and its shardwise.inference.Signature, as a pair, with a third
        element if the model is called otherwise than model(dense, features); or it returns a PredictFactory. If it
        takes an argument, it gets the checkpoint's manifest. The weights of --checkpoint are loaded into the model, by
        the names that it had when it was saved.
        """
        dtypes = _per_table(exceptions)
        load_torch()
        from ..inference.folder import require_free

        with one_line(ValueError, TypeError, OSError, RuntimeError, LookupError):
            require_free(folder.absolute(), force=force)
            facts, before = _export(folder, factory, checkpoint, (dtype, dtypes, output_dtype), aoti, force)
        if as_json:
            print_json(_as_json(folder, facts, before))
        else:
            _print(folder, facts, before)


def _export(
    folder: Path,
    factory: str,
    checkpoint: Path | None,
    dtypes: tuple[str, Mapping[str, str], str],
    aoti: bool,
    force: bool,
) -> tuple[ModelFacts, dict[str, int]]:
    """Do it step by step; also the bytes that each table had."""
    from ..inference import export_model, quantize_inference_model

    with spinner("reading the checkpoint" if checkpoint else "making the model") as update:
        manifest, weights = _checkpoint(checkpoint)
        update(f"making the model of {factory}")
        model, signature, call = _made(factory_named(factory), factory, manifest)
        if weights is not None:
            _load(model, weights)
        before = _trained_bytes(model)
        update("quantizing the tables")
        each, exceptions, output = dtypes
        if before:
            unknown = sorted(set(exceptions) - set(before))
            if unknown:
                near = did_you_mean(unknown[0], before) or f"; the tables are {', '.join(sorted(before))}"
                raise ValueError(f"--table-dtype names {unknown[0]!r}, which is no table{near}")
            model = quantize_inference_model(
                model,
                per_table_weight_dtype={name: _torch_dtype(dtype) for name, dtype in exceptions.items()},
                quantization_dtype=_torch_dtype(each),
                fp_weight_dtype=_torch_dtype(each),
                output_dtype=_torch_dtype(output),
            )
        elif exceptions or (each, output) != ("int8", "fp32"):
            raise ValueError(
                f"the model of {factory} has no float tables to quantize: --dtype, --table-dtype and --output-dtype"
                " have no effect on it"
            )
        update(f"tracing{', compiling' if aoti else ''} and writing the model")
        facts = export_model(model, folder, signature=signature, call=call, compiled=aoti, force=force)
    return facts, before


def _checkpoint(path: Path | None) -> tuple[Manifest | None, dict[str, torch.Tensor] | None]:
    """The manifest and the whole weights of a checkpoint, if there is one."""
    if path is None:
        return None, None
    from ..checkpoint import full_state_dict, read_manifest
    from ..sharding.checkpoint.offline import checkpoint_at

    with one_line(ImportError):
        place = checkpoint_at(path)
    if place != path:
        click.echo(f"{place.name} is the newest good checkpoint of {path}", err=True)
    return read_manifest(place), full_state_dict(place)


def _made(factory: Callable[..., Any], text: str, manifest: Manifest | None) -> _Made:
    """Call the factory and look at what it returns.

    Raises:
        ValueError: it wants a checkpoint and there is none.
        TypeError: it returns something else.
    """
    from ..inference import PredictFactory
    from ..inference.predict import parts_of

    wanted = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty
    ]
    if wanted and manifest is None:
        raise ValueError(f"{text} takes the manifest of a checkpoint: pass --checkpoint")
    try:
        returned = factory(manifest) if wanted else factory()
        if isinstance(returned, PredictFactory):
            return _Made(*parts_of(returned, None, None))
    except (Exception, SystemExit) as error:
        raise failed(text, error) from error
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        return _Made(*returned)
    raise TypeError(
        f"{text} returned {type(returned).__name__}: it must return (model, signature), (model, signature, call) or a"
        " PredictFactory"
    )


def _load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load the weights; ValueError names what does not fit."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"the checkpoint does not fit the model: {error}") from error


def _trained_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of each float table, by its name."""
    from ..embeddings import EmbeddingBagCollection, EmbeddingCollection

    bytes_of: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            children = module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings
            bytes_of.update({name: child.weight.nbytes for name, child in children.items()})  # type: ignore[misc]
    return bytes_of


def _per_table(exceptions: tuple[str, ...]) -> dict[str, str]:
    """TABLE=DTYPE, by table; a usage error for anything else."""
    dtypes = {}
    for text in exceptions:
        name, equals, dtype = text.rpartition("=")
        if not equals or dtype not in _DTYPES:
            near = did_you_mean(dtype, _DTYPES) if equals else ""
            raise click.BadParameter(
                f"{text!r}: write TABLE=DTYPE, DTYPE one of {', '.join(_DTYPES)}{near}", param_hint="--table-dtype"
            )
        dtypes[name] = dtype
    return dtypes


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, _DTYPES[name])  # type: ignore[no-any-return]


def _print(folder: Path, facts: ModelFacts, before: Mapping[str, int]) -> None:
    from rich.filesize import decimal

    table = table_of("table", "rows x columns", "rows are", right=("before", "now", "smaller"))
    was = {entry.name: before.get(entry.name, entry.fp32_bytes) for entry in facts.tables}
    for entry in facts.tables:
        table.add_row(entry.name, f"{entry.rows} x {entry.dim}", entry.format, *_sizes(was[entry.name], entry.bytes))
    table.add_row("all tables", "", "", *_sizes(sum(was.values()), sum(entry.bytes for entry in facts.tables)))
    print_table(table)
    show(f"{folder}: {', '.join(f'{file.name} {decimal(file.bytes)}' for file in facts.files)}")
    show(f"takes {_inputs(facts)}; gives {', '.join(output.name for output in facts.outputs)}")


def _as_json(folder: Path, facts: ModelFacts, before: Mapping[str, int]) -> dict[str, Any]:
    """What was written, for programs; sizes in bytes."""
    return {
        "path": str(folder),
        "tables": [
            {"name": table.name, "rows": table.rows, "dim": table.dim, "format": table.format,
             "bytes_before": before.get(table.name, table.fp32_bytes), "bytes": table.bytes}
            for table in facts.tables
        ],
        "files": {file.name: file.bytes for file in facts.files},
        "dense": [*facts.dense], "features": [feature.name for feature in facts.features], "weighted": facts.weighted,
        "outputs": [output.name for output in facts.outputs],
    }  # fmt: skip


def _sizes(before: int, after: int) -> tuple[str, str, str]:
    from rich.filesize import decimal

    return decimal(before), decimal(after), f"{before / max(1, after):.2f}x"


def _inputs(facts: ModelFacts) -> str:
    ids = f"ids of {', '.join(feature.name for feature in facts.features)}{' with weights' if facts.weighted else ''}"
    return f"{len(facts.dense)} dense columns and {ids}" if facts.dense else ids
