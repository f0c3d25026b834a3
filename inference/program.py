"""An exported model, loaded to serve: needs torch and the kernels of shardwise, and nothing of what trained it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.export import ExportedProgram

from shardwise.kernels import Feature, check_ids, new_guard, pack_features

# it imports shardwise.kernels, whose ops programs call
from .folder import COMPILED, PROGRAM, TABLES, ModelDamaged, ModelFacts, check_file, read_facts


class Program:
    """A model that answers batches; `facts` is what `model.json` says of it.

    It holds no state between calls: several threads may call it.
    """

    def __init__(self, facts: ModelFacts, module: Callable[..., Sequence[Tensor]]) -> None:
        self.facts, self._module = facts, module

    @torch.inference_mode()
    def __call__(
        self, values: Tensor, lengths: Tensor, *, dense: Tensor | None = None, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The outputs of a batch of B samples, by name.

        Shapes: values [N] ids of all features, the first feature's first; lengths [F, B] or [F * B], how many of them
        each sample has; weights [N], for a weighted model; dense [B, columns], for one that has a dense input.

        Raises:
            TypeError: a tensor has the wrong dtype.
            ValueError: shapes or lengths do not fit together, or an input is missing or too much.
            IndexError: an id is outside its table; names feature, table, sample and id.
        """
        inputs = {"values": _ids("values", values), "lengths": self._lengths(lengths, values)}
        batch = inputs["lengths"].shape[1]
        inputs.update(self._floats("weights", weights, (values.shape[0],) if self.facts.weighted else None))
        inputs.update(self._floats("dense", dense, (batch, len(self.facts.dense)) if self.facts.dense else None))
        outputs = self._module(**inputs)
        return dict(zip((output.name for output in self.facts.outputs), outputs, strict=True))

    def _lengths(self, lengths: Tensor, values: Tensor) -> Tensor:
        count = len(self.facts.features)
        if values.dim() != 1:
            raise ValueError(f"values must have one dim, got shape {list(values.shape)}")
        if lengths.numel() % count or lengths.dim() not in (1, 2) or (lengths.dim() == 2 and lengths.shape[0] != count):
            raise ValueError(
                f"lengths must be [{count}, batch] for features {[feature.name for feature in self.facts.features]},"
                f" got shape {list(lengths.shape)}"
            )
        lengths = _ids("lengths", lengths).view(count, lengths.numel() // count)
        if lengths.is_cpu and (int(lengths.sum()) != values.shape[0] or bool((lengths < 0).any())):
            raise ValueError(
                f"lengths must not be negative, and add up to the {values.shape[0]} values; they add up to"
                f" {int(lengths.sum())}, the least is {int(lengths.min()) if lengths.numel() else 0}"
            )
        return lengths

    def _floats(self, name: str, given: Tensor | None, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        if given is None and shape is None:
            return {}
        if given is None:
            raise ValueError(f"this model takes {name}, of shape {list(shape or ())}")
        if shape is None:
            raise ValueError(f"this model takes no {name}")
        if not given.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {_name(given.dtype)}")
        if tuple(given.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}")
        return {name: given.float()}


def load_program(folder: str | os.PathLike[str], *, compiled: bool = False, verify: bool = True) -> Program:
    """The model of a folder that `export_model` wrote, on the CPU.

    Load no folder that you do not trust: torch unpickles parts of a program, and compiled code is a library that runs.
    Checksums show damage, not who wrote the folder. `read_tables` reads numbers and JSON alone.

    Args:
        folder: where it is.
        compiled: run the code that was compiled ahead of time, where the export was asked for it.
        verify: compare the checksums of its files first, for which they are read once more.

    Raises:
        FileNotFoundError: it is no exported model.
        ModelDamaged: a file is missing, cut off or changed, or of a later version; names it.
    """
    facts = read_facts(folder)
    tables = check_file(folder, facts, TABLES, verify=verify)
    path = check_file(folder, facts, PROGRAM, verify=verify)
    try:
        with warnings.catch_warnings():
            # torch 2.9 says so of bytes that nobody writes to
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            program = torch.export.load(path)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ModelDamaged(f"{path} cannot be loaded by torch {torch.__version__}: {error}") from error
    # of other sizes the lookups, which are compiled for these, would read past the end
    named = program.graph_signature.inputs_to_buffers
    takes = {named[node.name]: node.meta["val"] for node in program.graph.nodes if node.name in named}
    for plane in facts.planes:
        taken = takes.get(plane.name)
        if taken is None:
            raise ModelDamaged(f"{path} has no {plane.name}, of which {folder} has tables")
        if taken.dim() != 1 or (taken.shape[0], _name(taken.dtype)) != (plane.elements, plane.dtype):
            raise ModelDamaged(
                f"{path} takes {plane.name} of {list(taken.shape)} {_name(taken.dtype)}, model.json says"
                f" [{plane.elements}] {plane.dtype}"
            )
    program.state_dict.update(read_planes(tables, facts))
    if compiled:
        return Program(facts, CompiledModule(check_file(folder, facts, COMPILED, verify=verify), program, facts))
    return Program(facts, program.module())


def read_planes(path: Path, facts: ModelFacts) -> dict[str, Tensor]:
    """The flat planes of the tables, by their names in the program.

    Raises:
        ModelDamaged: the file lacks a tensor, or it does not fit where it goes.
    """
    planes: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for plane in facts.planes:
                whole = torch.zeros(plane.elements, dtype=getattr(torch, plane.dtype))
                for place in plane.places:
                    cells = file.get_tensor(place.tensor).reshape(-1)
                    if cells.dtype != whole.dtype or not 0 <= place.begin <= whole.numel() - cells.numel():
                        raise ModelDamaged(f"{path}: {place.tensor} does not fit into the program's {plane.name}")
                    whole[place.begin : place.begin + cells.numel()] = cells
                planes[plane.name] = whole
    except SafetensorError as error:
        raise ModelDamaged(f"{path}: {error}") from error
    return planes


def _ids(name: str, given: Tensor) -> Tensor:
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {_name(given.dtype)}")
    return given.long()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# typed by nobody, and slow to import
_INDUCTOR = "torch._inductor"
_MOST = torch.iinfo(torch.int64).max


def compile_program(program: ExportedProgram, path: Path) -> None:
    """Compile with the C++ compiler that torch finds; some tens of seconds."""
    settings = {"aot_inductor.package_constants_in_so": False}
    import_module(_INDUCTOR).aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)


class CompiledModule:
    """Runs a program that torch's AOTInductor compiled ahead of time, for the kind of processor that compiled it.

    The package holds code alone: tables and other weights are those of the program that it was made of.

    Raises:
        ModelDamaged: torch cannot load it, as it was compiled for another processor or by another torch, say.
    """

    def __init__(self, path: Path, program: ExportedProgram, facts: ModelFacts) -> None:
        tensors: Mapping[str, Any] = {**program.constants, **program.state_dict}
        try:
            self._run = import_module(_INDUCTOR).aoti_load_package(str(path))
            wanted = {name: tensors[name] for name in self._run.get_constant_fqns()}
            self._run.load_constants(wanted, check_full_update=True, user_managed=True)
        except (RuntimeError, KeyError, OSError) as error:
            raise ModelDamaged(
                f"{path} cannot be loaded by torch {torch.__version__} on this machine: {error}"
            ) from error
        self._facts = facts
        sizes = [_MOST if feature.ids is None else feature.ids for feature in facts.features]
        self._ids = pack_features([Feature(0, size, 1, 0) for size in sizes], torch.device("cpu"))
        self._names = [
            f"feature {feature.name!r} (table {', '.join(map(repr, feature.tables))})" for feature in facts.features
        ]

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs. Ids are checked before: what is raised inside of compiled code comes out without its type."""
        lengths = inputs["lengths"]
        if not lengths.shape[1]:
            # compiled code has no blocks of no samples
            return tuple(
                torch.zeros([0 if isinstance(n, str) else n for n in output.shape], dtype=getattr(torch, output.dtype))
                for output in self._facts.outputs
            )
        offsets = torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0))
        check_ids(inputs["values"], offsets, self._ids, new_guard(), names=self._names)
        outputs = self._run(**inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
