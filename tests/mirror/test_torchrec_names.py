"""TorchRec's import paths and arguments lead to ours, as many as are committed; what we lack is said by name.

Takes 25 s: each import of a name that TorchRec has is tried in a new process where it changes what is imported.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from checkout import SHARED, run_python

from shardwise import torchrec as names
from shardwise.migration.hints import HINTS, advice
from shardwise.migration.mirror import MODULES, OWN_NAMES
from shardwise.torchrec import TABLE

# a type of callables is not a class
GenericAlias = type(Callable[[int], int])
ENTRIES = [(path, name) for path, table in names.TABLE.items() for name in table]
# TorchRec's own list of names, where a checkout has it beside it
REFERENCE = SHARED / "reference"
NEEDS_REFERENCE = pytest.mark.skipif(
    not (REFERENCE / "torchrec_names.md").is_file(), reason="the list of TorchRec's names is not here"
)
# exported by upstream's __init__ files, which define nothing themselves
EXPORTED = {
    "torchrec", "torchrec.distributed", "torchrec.distributed.planner", "torchrec.distributed.planner.estimator",
    "torchrec.distributed.train_pipeline",
    "torchrec.fx", "torchrec.optim", "torchrec.quant",
    # and by modules that import them
    "torchrec.distributed.sharding_plan", "torchrec.distributed.train_pipeline.utils",
    "torchrec.distributed.planner.constants", "torchrec.distributed.planner.enumerators",
    "torchrec.distributed.planner.planners", "torchrec.distributed.planner.shard_estimators",
    "torchrec.distributed.planner.types",
    "torchrec.distributed.embedding", "torchrec.distributed.embedding_lookup",
    "torchrec.distributed.embedding_sharding", "torchrec.distributed.embeddingbag",
}  # fmt: skip
# what its wheel has to test programs with, which is in no list
_SHARDERS = (
    "TestEBCSharder TestEBCSharderMCH TestEBSharder TestECSharder TestETCSharder TestETSharder TestFusedEBCSharder "
    "TestFusedECSharder TestMCSharder"
)
FOR_TESTS = {
    "torchrec.distributed.test_utils.emb_sharder": _SHARDERS,
    "torchrec.distributed.test_utils.test_model": (
        # the sharders were here before 1.8
        f"{_SHARDERS} DENSE_LAYER_OUT_SIZE ModelInput OVER_ARCH_OUT_SIZE TestDHNArch TestDenseArch TestEBCSparseArch "
        "TestNegSamplingModule TestOverArch TestOverArchRegroupModule TestPositionWeightedPreprocModule TestSparseNN "
        "TestSparseNNBase TestTowerCollectionSparseNN TestTowerInteraction TestTowerSparseNN"
    ),
    "torchrec.distributed.test_utils.test_sharding": "SharderType copy_state_dict create_test_sharder",
    "torchrec.test_utils": (
        "assert_state_buffers_parameters_equal cuda_device_count get_free_port get_state_buffers_parameters "
        "init_distributed_single_host is_asan is_asan_or_tsan is_tsan seed_and_log skip_if_asan skip_if_asan_class"
    ),
    "torchrec.distributed.test_utils.multi_process": (
        "MultiProcessContext MultiProcessTestBase run_multi_process_func get_free_port init_distributed_single_host "
        "seed_and_log"
    ),
    "torchrec.distributed.test_utils.process_runner": (
        "REQUIRED_ENV_VARS SingleProcessContext check_required_env_vars run_local_multi_process_func "
        "run_single_process_func"
    ),
}
# imported there under another name
RENAMED = {
    "torchrec.distributed.quant_embeddingbag.QuantFeatureProcessedEmbeddingBagCollection",
    "torchrec.distributed.planner.estimator.EmbeddingPerfEstimatorV2",
    "torchrec.distributed.planner.estimator.estimator.EmbeddingPerfEstimatorV2",
}
# of its pipelines, which programs import for their own subclasses
TYPE_VARIABLES = {"In", "Out", "StageOut"}
# torch's own, passed on there
TORCHS = {"torchrec.distributed.types.ShardedTensorMetadata"}
# private there, and imported by programs
PRIVATE = {
    "torchrec.distributed.shard._shard_modules",
    "torchrec.distributed.embeddingbag._apply_mean_pooling",
    "torchrec.distributed.embeddingbag._create_mean_pooling_divisor",
}
# of TorchRec's main branch after 1.8
LATER = {
    "torchrec.modules.sorted_index_select.maybe_sorted_index_select",
    "torchrec.modules.sorted_index_select.sorted_index_select",
    "torchrec.distributed.planner.storage_reservations.SKUAwareStorageReservation",
}
# defined inside of a `try`, which the list of signatures leaves out
IN_A_TRY = {
    f"torchrec.pt2.checks.{name}"
    for name in ("is_compiler_compiling", "is_non_strict_exporting", "is_torchdynamo_compiling")
}
# scripts of which the list of names has but the first
SCRIPTS = {f"torchrec.datasets.scripts.{name}_preproc_criteo.main" for name in ("contiguous", "shuffle")}


@pytest.mark.parametrize(("path", "name"), ENTRIES, ids=[f"{path}.{name}" for path, name in ENTRIES])
def test_the_entry_leads_to_our_name(path: str, name: str) -> None:
    module = import_module(path.replace("torchrec", "shardwise.torchrec", 1))
    value = getattr(module, name)
    if not callable(value) or isinstance(value, GenericAlias):
        # a constant does not know where it is from: that of a logger is its name
        kinds = (
            int | float | str | dict | list | tuple | frozenset | logging.Logger | torch.dtype | GenericAlias | TypeVar
        )
        assert isinstance(value, kinds)
        return
    # torch's own optimizers are what the backward of a table takes, and its sharded tensors what a state dict has
    assert value.__module__.startswith(("shardwise.", "torch.optim.", "torch.distributed._shard.")), f"{value!r}"
    assert value.__name__ == name or name in dir(module)


@NEEDS_REFERENCE
def test_every_entry_is_a_name_of_torchrec() -> None:
    known: dict[str, set[str]] = {}
    for line in (REFERENCE / "torchrec_names.md").read_text().splitlines():
        if match := re.match(r"- `(torchrec[\w.]*)`: (.*)", line):
            known.setdefault(match[1], set()).update(re.findall(r"(\w+) \(\d\)", match[2]))
    path = ""
    for line in (REFERENCE / "torchrec_signatures.txt").read_text().splitlines():
        if match := re.match(r"## \./(.*)\.py$", line):
            path = "torchrec." + match[1].replace("/", ".")
        elif match := re.match(r"(?:class|def) (\w+)", line):
            known.setdefault(path, set()).add(match[1])
    known.update({path: set(names.split()) for path, names in FOR_TESTS.items()})
    everything = set().union(*known.values())
    features = (REFERENCE / "torchrec_features.md").read_text()
    unknown = []
    for path, name in ENTRIES:
        # an __init__, or a module that imports the name: listed under `.planner.types.{..., name}` and the like
        elsewhere = path in EXPORTED or f".{path.split('.', 2)[-1]}.{{" in features or path == "torchrec.types"
        # of constants there is no list
        listed = name in known.get(path, set()) or name in TYPE_VARIABLES or (name.isupper() and path in known)
        if not listed and not (elsewhere and name in everything):
            unknown.append(f"{path}.{name}")
    assert set(unknown) == RENAMED | PRIVATE | TORCHS | LATER | SCRIPTS | IN_A_TRY


def test_constants_of_datasets_have_upstreams_values() -> None:
    """The first line of most programs that train on Criteo: `torchrec.datasets.criteo` was no module."""
    from shardwise.data import criteo as reader

    criteo, movielens = (import_module(f"shardwise.torchrec.datasets.{name}") for name in ("criteo", "movielens"))
    assert (criteo.INT_FEATURE_COUNT, criteo.CAT_FEATURE_COUNT, criteo.FREQUENCY_THRESHOLD) == (13, 26, 3)
    assert (criteo.DAYS, criteo.TOTAL_TRAINING_SAMPLES, criteo.DEFAULT_LABEL_NAME) == (24, 4195197692, "label")
    integers, categories = [f"int_{n}" for n in range(13)], [f"cat_{n}" for n in range(26)]
    assert integers == criteo.DEFAULT_INT_NAMES and categories == criteo.DEFAULT_CAT_NAMES
    assert ["label", *integers, *categories] == criteo.DEFAULT_COLUMN_NAMES
    # and they are those of the batches that our reader makes
    assert (*integers,) == reader.Criteo.dense_names and (*categories,) == reader.CATEGORY_NAMES
    assert (movielens.RATINGS_FILENAME, movielens.MOVIES_FILENAME) == ("ratings.csv", "movies.csv")
    assert movielens.DEFAULT_RATINGS_COLUMN_NAMES == ["userId", "movieId", "rating", "timestamp"]
    assert movielens.DEFAULT_MOVIES_COLUMN_NAMES == ["movieId", "title", "genres"]
    assert movielens.DEFAULT_COLUMN_NAMES == ["userId", "movieId", "rating", "timestamp", "title", "genres"]


# a claim, and a program that holds it
PROGRAMS = {
    "install serves torchrec itself": """
import shardwise.torchrec
shardwise.torchrec.install()
shardwise.torchrec.install()
import torchrec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
import torchrec.optim as trec_optim
from shardwise.jagged import KeyedJaggedTensor as ours
assert torchrec.KeyedJaggedTensor is KeyedJaggedTensor is ours
assert trec_optim is torchrec.optim
assert "KeyedJaggedTensor" in dir(torchrec) and "optim" in dir(torchrec)
""",
    "a bare import reaches the model parallel class by attribute": """
import shardwise.torchrec
shardwise.torchrec.install()
import torchrec
from torchrec.distributed.model_parallel import DistributedModelParallel
assert torchrec.distributed.DistributedModelParallel is DistributedModelParallel
""",
    "a name that is a function and a module stays the function": """
import shardwise.torchrec
shardwise.torchrec.install()
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
import torchrec
assert torchrec.optim.apply_optimizer_in_backward is apply_optimizer_in_backward
""",
    "install refuses to mix with the real torchrec": """
import sys, types
sys.modules["torchrec"] = types.ModuleType("torchrec")
import shardwise.torchrec
try:
    shardwise.torchrec.install()
except ImportError as error:
    assert "already imported" in str(error)
else:
    raise SystemExit("install() replaced the real torchrec")
""",
    "without install torchrec is left alone": """
import shardwise.torchrec, importlib.util, sys
assert "torchrec" not in sys.modules
spec = importlib.util.find_spec("torchrec")
assert spec is None or "shardwise" not in str(spec.origin)
""",
    "install refuses a submodule of the real torchrec": """
import sys, types
sys.modules["torchrec.sparse"] = types.ModuleType("torchrec.sparse")
import shardwise.torchrec
try:
    shardwise.torchrec.install()
except ImportError as error:
    assert "already imported (torchrec.sparse)" in str(error), error
else:
    raise SystemExit("install() mixed with the real torchrec")
""",
    "uninstall gives the name back": """
import shardwise.torchrec, sys
shardwise.torchrec.install()
from torchrec.sparse.jagged_tensor import JaggedTensor
shardwise.torchrec.uninstall()
assert not [name for name in sys.modules if name.split(".")[0] == "torchrec"]
from shardwise.torchrec.sparse.jagged_tensor import JaggedTensor as still
assert still is JaggedTensor
""",
    "attributes that scripts expect of a bare import are there": """
import shardwise.torchrec
shardwise.torchrec.install()
import torchrec
for path in ("distributed.DistributedModelParallel", "optim.RowWiseAdagrad", "modules.embedding_modules",
             "sparse.jagged_tensor.KeyedJaggedTensor", "quant.EmbeddingBagCollection", "PoolingType.SUM",
             "distributed.planner.EmbeddingShardingPlanner", "inference.modules.quantize_inference_model"):
    value = torchrec
    for part in path.split("."):
        value = getattr(value, part)
assert torchrec.__version__.startswith("1.8.0+shardwise.")
space = {}
exec("from torchrec.optim import *", space)
assert space["RowWiseAdagrad"] is torchrec.optim.RowWiseAdagrad
""",
    "fbgemm's names are served where it is not installed": """
import shardwise.torchrec
shardwise.torchrec.install()
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    PoolingMode, BoundsCheckMode, CacheAlgorithm, MultiPassPrefetchConfig)
import torchrec.distributed.types as types
assert types.CacheAlgorithm is CacheAlgorithm and types.BoundsCheckMode is BoundsCheckMode
try:
    import fbgemm_gpu.tbe.ssd
except ModuleNotFoundError as error:
    assert "no counterpart of fbgemm_gpu.tbe.ssd; ops are torch.ops.fbgemm.* after import" in str(error), error
else:
    raise SystemExit("served what we lack")
""",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("claim", PROGRAMS)
def test_in_a_fresh_process(claim: str) -> None:
    run_python("-c", PROGRAMS[claim])


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("from shardwise.torchrec.modules.mlp import Mystery", "torchrec.modules.mlp.Mystery"),
        ("from shardwise.torchrec import Mystery", "torchrec.Mystery"),
        ("import shardwise.torchrec.mystery.module", "torchrec.mystery"),
        ("import shardwise.torchrec; shardwise.torchrec.optim.Mystery", "torchrec.optim.Mystery"),
    ],
)
def test_a_name_we_lack_is_said_by_name(statement: str, missing: str) -> None:
    with pytest.raises((ImportError, AttributeError), match=f"no counterpart of {re.escape(missing)}($|;)"):
        exec(statement, {})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("torchrec.optim.RowWiseAdaGrad", "nearest: torchrec.optim.RowWiseAdagrad"),
        ("torchrec.modules.EmbeddingBagCollection", "torchrec.modules.embedding_modules.EmbeddingBagCollection"),
        ("torchrec.distributed.embeding", "nearest: torchrec.distributed.embedding"),
        ("torchrec.metrics.auc.AUCMetric", "torchmetrics has most of them"),
        ("torchrec.distributed.sharding.rw_sharding.RwPooledEmbeddingSharding", "one step of the engine serves all"),
        ("torchrec.distributed.batched_embedding_kernel", "host memory, caches and SSD are not served"),
        ("fbgemm_gpu.split_table_batched_embeddings_ops_training.UVMCacheStatsIndex", "are modules"),
    ],
)
def test_a_name_we_lack_is_said_with_its_reason_and_what_is_near(name: str, near: str) -> None:
    assert advice(name).startswith(f"shardwise has no counterpart of {name}; ")
    assert near in advice(name)


def test_a_hint_is_about_something_that_we_lack() -> None:
    # a module of which we have a part may have one for the rest
    for name in HINTS:
        module, _, last = name.rpartition(".")
        assert last not in names.TABLE.get(module, {}), f"{name} is there"


def test_own_names_of_the_mirror_are_those_of_its_root() -> None:
    assert tuple(names.__all__) == OWN_NAMES


# the list that ours was made of, where a checkout has it beside it
AREAS = ("sparse", "modules", "distributed", "optim", "quant", "inference", "fx", "streamable", "types", "")
# names of these areas that are there, of core and of common ones
COMMITTED = {1: 152, 2: 61}


def lines_of(name: str) -> list[list[str]]:
    """The words of each line of a list beside this file."""
    text = Path(__file__).with_name(name).read_text()
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def listed() -> list[tuple[int, str, str]]:
    """Level, module and name; the name is empty where the module itself is imported."""
    lines = lines_of("torchrec_names.txt")
    return [(int(level), path, *rest, *([] if rest else [""]))[:3] for level, path, *rest in lines]  # type: ignore[misc]


def area(path: str) -> str:
    return f"{path}.".split(".")[1]


def leads_somewhere(path: str, name: str) -> bool:
    if not name:
        return path in MODULES
    if name not in TABLE.get(path, {}):
        return False
    getattr(import_module(path.replace("torchrec", "shardwise.torchrec", 1)), name)
    return True


def test_core_and_common_names_lead_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    have: Counter[int] = Counter()
    total: Counter[int] = Counter()
    lacking: set[str] = set()
    for level, path, name in listed():
        if area(path) in AREAS:
            total[level] += 1
            if leads_somewhere(path, name):
                have[level] += 1
            else:
                lacking.add(f"{path}.{name}")
    with capsys.disabled():
        print(f"\nnames of TorchRec: core {have[1]} of {total[1]}, common {have[2]} of {total[2]}")
    assert not lacking
    assert {level: have[level] for level in COMMITTED} == COMMITTED


def test_names_of_models_and_data_lead_somewhere() -> None:
    others = [(path, name) for _, path, name in listed() if area(path) in ("models", "datasets")]
    assert others and all(leads_somewhere(path, name) for path, name in others)


@NEEDS_REFERENCE
def test_the_committed_list_is_the_reference() -> None:
    wanted = []
    for path, listing in re.findall(r"^- `([\w.]+)`: (.*)$", (REFERENCE / "torchrec_names.md").read_text(), re.M):
        for name, level in re.findall(r"(\(?\w+\)?) \((\d)\)", listing):
            if int(level) <= 2:
                wanted.append((int(level), path, "" if name == "(module)" else name))
    assert listed() == wanted


CALLS = lines_of("torchrec_arguments.txt")
# last arguments that we do not take: given, they raise
WITHOUT = {"maximize"}
# what only sharders construct; theirs are of another engine
INTERNAL = {
    *("ShardedEmbeddingTower", "ShardedEmbeddingTowerCollection", "ShardedEmbeddingBag", "FusedOptimizer"),
    *("ShardedFeatureProcessedEmbeddingBagCollection", "ShardedQuantFeatureProcessedEmbeddingBagCollection"),
    *("ShardedManagedCollisionEmbeddingCollection", "ShardedManagedCollisionEmbeddingBagCollection"),
    "ShardedManagedCollisionCollection",
}


@pytest.mark.parametrize(("path", "name", "upstream"), [(p, n, a) for p, n, *a in CALLS], ids=[c[1] for c in CALLS])
def test_arguments_are_torchrecs_in_their_order(path: str, name: str, upstream: list[str]) -> None:
    home, _, attribute = TABLE[path][name].partition(":")
    parameters = inspect.signature(getattr(import_module(home), attribute)).parameters.values()
    if name in INTERNAL or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    while upstream and upstream[-1] in WITHOUT:
        upstream = upstream[:-1]
    by_position = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(upstream)] == upstream
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    assert set(required) <= set(upstream), "an argument of ours has no default"
