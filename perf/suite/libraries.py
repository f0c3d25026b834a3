"""The libraries that are measured and compared, each as one place for names that lie in several of its modules."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from shardwise.kernels import _op, numba_loops

# modules of TorchRec; ours has those below shardwise.torchrec that it has a counterpart of
TORCHREC = (
    "sparse.jagged_tensor", "sparse.jagged_tensor_validator", "sparse.tensor_dict", "modules.regroup",
    "modules.embedding_configs", "modules.embedding_modules", "modules.fused_embedding_modules", "modules.mc_modules",
    "modules.tensor_pool", "modules.keyed_jagged_tensor_pool",
    "optim.rowwise_adagrad", "optim.apply_optimizer_in_backward", "optim.keyed", "optim.optimizers",
    "distributed.model_parallel", "distributed.embeddingbag", "distributed.sharding_plan",
    "distributed.planner.planners", "distributed.planner.types", "distributed.types", "inference.modules",
    "tensor_types", "models.dlrm", "distributed.fbgemm_qcomm_codec",
)  # fmt: skip
# those of planners first: a name means what it means there
PLANNER = (
    *(
        f"distributed.planner.{name}"
        for name in (
            "types", "shard_estimators", "proposers", "partitioners", "perf_models", "enumerators", "utils", "stats",
            "storage_reservations", "planners",
        )
    ),
    "distributed.types", "distributed.embeddingbag", "distributed.sharding_plan", "modules.embedding_configs",
    "modules.embedding_modules", "optim.rowwise_adagrad",
)  # fmt: skip
FBGEMM = (
    "split_embedding_configs", "split_table_batched_embeddings_ops_common",
    "split_table_batched_embeddings_ops_training", "split_table_batched_embeddings_ops_inference",
)  # fmt: skip


class Library:
    """Names of several modules in one place; each is looked up once, so that the look-up is not timed.

    Attributes:
        peer: it is not ours.
        folder: of its own code.
    """

    def __init__(self, label: str, modules: Sequence[Any], *, peer: bool = False, folder: str = "") -> None:
        self.label, self.modules, self.peer, self.folder = label, modules, peer, folder

    def __getattr__(self, name: str) -> Any:
        for module in self.__dict__.get("modules", ()):
            try:
                value = getattr(module, name)
            except (AttributeError, ImportError):
                continue
            setattr(self, name, value)
            return value
        raise AttributeError(f"{self.__dict__.get('label')} has no attribute {name}")


@cache
def ours(modules: Sequence[str] = TORCHREC) -> Library:
    """shardwise by TorchRec's names, and its functions of tensors."""
    names = [*(f"shardwise.torchrec.{name}" for name in modules), "shardwise.jagged", "shardwise.kernels"]
    return Library("shardwise", list(_importable(names)), folder=_folder("shardwise"))


@cache
def torchrec(modules: Sequence[str] = TORCHREC) -> Library:
    """TorchRec with FBGEMM's ops and modules.

    Raises:
        ImportError: they are not installed.
    """
    own = [importlib.import_module(name) for name in (*(f"torchrec.{name}" for name in modules), "torchrec")]
    return Library("TorchRec", [*own, torch.ops.fbgemm, *fbgemm().modules], peer=True, folder=_folder("torchrec"))


@cache
def fbgemm() -> Library:
    """FBGEMM's modules of tables.

    Raises:
        ImportError: it is not installed.
    """
    modules = [importlib.import_module(name) for name in ("fbgemm_gpu", *(f"fbgemm_gpu.{name}" for name in FBGEMM))]
    return Library("FBGEMM", modules, peer=True)


def _importable(names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        try:
            yield importlib.import_module(name)
        except ImportError:
            # its names are missing then
            continue


def _folder(package: str) -> str:
    return os.path.dirname(str(importlib.import_module(package).__file__))


@contextmanager
def without_numba() -> Iterator[None]:
    """Ours on torch alone, as SHARDWISE_NUMBA=0 has it."""
    numba_loops.loops.cache_clear()
    try:
        with patch.object(_op, "NUMBA", False):
            yield
    finally:
        numba_loops.loops.cache_clear()
