"""Programs compiled ahead of time by torch's AOTInductor, for the kind of processor that compiled them.

The package holds code alone: tables and other weights are those of the program beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from shardwise.kernels import Feature, check_ids, new_guard, pack_features

from .folder import ModelDamaged, ModelFacts

# typed by nobody, and slow to import
_INDUCTOR = "torch._inductor"
_MOST = torch.iinfo(torch.int64).max


def compile_program(program: ExportedProgram, path: Path) -> None:
    """Compile with the C++ compiler that torch finds; some tens of seconds."""
    settings = {"aot_inductor.package_constants_in_so": False}
    import_module(_INDUCTOR).aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)


class CompiledModule:
    """Runs a compiled program on the tensors of the program that it was made of.

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
        sizes = [_MOST if one.ids is None else one.ids for one in facts.features]
        self._ids = pack_features([Feature(0, size, 1, 0) for size in sizes], torch.device("cpu"))
        self._names = [f"feature {one.name!r} (table {', '.join(map(repr, one.tables))})" for one in facts.features]

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs. Ids are checked before: what is raised inside of compiled code comes out without its type."""
        lengths = inputs["lengths"]
        if not lengths.shape[1]:
            # compiled code has no blocks of no samples
            return tuple(
                torch.zeros([0 if isinstance(n, str) else n for n in one.shape], dtype=getattr(torch, one.dtype))
                for one in self._facts.outputs
            )
        offsets = torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0))
        check_ids(inputs["values"], offsets, self._ids, new_guard(), names=self._names)
        found = self._run(**inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)
