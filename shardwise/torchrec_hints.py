"""What to say of a name of TorchRec's that we lack: why, and what of ours is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from .torchrec_names import FBGEMM, TABLE

__all__ = ["HINTS", "advice"]

_HOST_TIERS = "rows live on the device that trains them: host memory, caches and SSD are not served"
_METRICS = "torchmetrics has most of them; shardwise.models has the AUC and normalized entropy of its examples"
_FBGEMM_KERNELS = "kernels are ops of torch.ops.shardwise, and tables are modules: EmbeddingBagCollection"

# a module or a name of TorchRec, and all below it -> why it is not here, and what to use
HINTS: Mapping[str, str] = {
    "fbgemm_gpu": _FBGEMM_KERNELS,
    "torchrec.datasets.criteo": "shardwise.data.Criteo reads its files",
    "torchrec.datasets.movielens": "shardwise.data.MovieLens reads its files",
    "torchrec.distributed.batched_embedding_kernel": _HOST_TIERS,
    "torchrec.distributed.embedding_dim_bucketer": _HOST_TIERS,
    "torchrec.distributed.embedding_sharding.group_tables": "tables are grouped by storage inside the engine",
    "torchrec.distributed.model_tracker": "changed ids are not tracked",
    "torchrec.distributed.planner.estimator": "estimators are classes: torchrec.distributed.planner.shard_estimators",
    "torchrec.distributed.test_utils": "tests/ranks.py of shardwise's repository spawns ranks for tests",
    "torchrec.metrics": _METRICS,
    "torchrec.ir": "torch.export takes the whole model, with its lookups as ops",
    "torchrec.modules.itep_modules": "pruning in training is not served",
}


def advice(name: str) -> str:
    """The message for a missing `torchrec.module` or `torchrec.module.Name`: the name, the reason, the nearest."""
    said = [f"shardwise has no counterpart of {name}"]
    parts = name.split(".")
    reason = next((HINTS[key] for end in range(len(parts), 0, -1) if (key := ".".join(parts[:end])) in HINTS), None)
    if reason is not None:
        said.append(reason)
    near = nearest(name)
    if near:
        said.append(f"nearest: {', '.join(near)}")
    return "; ".join(said)


def nearest(name: str, *, most: int = 3) -> list[str]:
    """Names that we have and that `name` may have meant, the likeliest first: the same elsewhere, or spelt alike."""
    module, _, last = name.rpartition(".")
    tables = {**TABLE, **FBGEMM}
    homes: dict[str, list[str]] = {}
    for path, names in tables.items():
        for one in (*names, path.rpartition(".")[2]):
            homes.setdefault(one, []).append(path if one not in names else f"{path}.{one}")
    alike = get_close_matches(last, homes, n=most, cutoff=0.75)
    found = [max(homes[one], key=lambda home: _shared(home, module)) for one in alike]
    return list(dict.fromkeys(found))


def _shared(home: str, module: str) -> int:
    """How many leading parts two paths have in common."""
    pairs = zip(home.split("."), module.split("."), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(home.count("."), module.count(".")) + 1)
