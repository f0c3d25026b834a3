"""What `shardwise migrate` says of a name: where ours is, how it differs, what is nearest."""

from __future__ import annotations

import re
from importlib import import_module
from runpy import run_path

import pytest
from checkout import ROOT

import shardwise
from shardwise.migration.differences import WORDS, differences
from shardwise.migration.fbgemm_names import FBGEMM, FBGEMM_OPS
from shardwise.migration.names import (
    _in_facade,
    finding,
    home_of,
    name_at,
)
from shardwise.migration.torchrec_names import TABLE

PAGE = ROOT / "docs/reference/differences.md"
printed = run_path(str(PAGE.with_suffix(".py")))["printed"]


def test_the_page_has_the_rows_of_the_data_and_no_others() -> None:
    assert printed(PAGE.read_text()) == PAGE.read_text(), "run `python docs/reference/differences.py`"
    different = PAGE.read_text().partition("\n## The same")[0]
    rows = [line for line in different.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) == len(differences())


def test_each_difference_has_one_of_three_words_that_the_page_explains() -> None:
    assert {row.word for row in differences()} == WORDS.keys()
    for word, meaning in WORDS.items():
        assert re.search(rf"(?m)^- `{word}`: .*\b{re.escape(meaning.split()[-1])}", PAGE.read_text()), meaning


def test_each_difference_begins_otherwise_and_has_no_cell_that_breaks_the_table() -> None:
    rows = [(row.section, row.torchrec) for row in differences()]
    assert len({*rows}) == len(rows)
    cells = [cell for row in differences() for cell in (row.torchrec, row.shardwise, row.why)]
    assert not [cell for cell in cells if not cell.strip() or " | " in cell or "\n" in cell]


def test_the_gravest_word_of_a_name_comes_first() -> None:
    entry = finding("torchrec.EmbeddingBagCollection")
    order = [[*WORDS].index(row.word) for row in entry.differences]
    assert order == sorted(order) and len({*order}) == 3 and entry.word == "numbers"
    assert finding("torchrec.PoolingType").word is None


def test_each_name_that_differs_is_one_that_we_have() -> None:
    own_names = {name for names in [*TABLE.values(), *FBGEMM.values()] for name in names} | FBGEMM_OPS
    own_names |= {
        f"quant.{name}" for path, names in TABLE.items() if path.startswith("torchrec.quant") for name in names
    }
    assert {name for row in differences() for name in row.names} <= own_names


@pytest.mark.parametrize(
    ("name", "own_path"),
    [
        ("torchrec.EmbeddingBagCollection", "shardwise.EmbeddingBagCollection"),
        ("torchrec.modules.embedding_modules.EmbeddingBagCollection", "shardwise.EmbeddingBagCollection"),
        ("torchrec.distributed.model_parallel.DistributedModelParallel", "shardwise.DistributedModelParallel"),
        ("torchrec.distributed.planner.types.Perf", "shardwise.planner.torchrec.types.Perf"),
        ("torchrec.optim.SGD", "torch.optim.SGD"),
        ("torchrec.distributed.planner", "shardwise.torchrec.distributed.planner"),
        ("torchrec.quant.EmbeddingBagCollection", "shardwise.quant.EmbeddingBagCollection"),
        ("fbgemm_gpu.split_embedding_configs.EmbOptimType", "shardwise.embeddings.optim.fbgemm_types.EmbOptimType"),
    ],
)
def test_a_name_that_we_have_is_said_with_its_place(name: str, own_path: str) -> None:
    assert finding(name).ours == own_path


def test_every_entry_of_the_table_is_found() -> None:
    for module, names in TABLE.items():
        for name in names:
            entry = finding(f"{module}.{name}")
            assert entry.status != "missing" and entry.ours, entry


def test_only_the_very_same_object_is_taken_from_the_facade() -> None:
    homes = {name: home_of("torchrec.modules.embedding_modules", name) for name in ("EmbeddingCollection", "Mystery")}
    assert homes == {
        "EmbeddingCollection": "shardwise",
        "Mystery": "shardwise.torchrec.modules.embedding_modules",
    }
    quantized = [module for module in TABLE if module.startswith("torchrec.quant")]
    assert [home_of(module, "EmbeddingBagCollection") for module in quantized] == [
        f"shardwise.{module}" for module in quantized
    ]
    for module, names in TABLE.items():
        for name in names:
            if home_of(module, name) == "shardwise":
                assert name in shardwise.__all__


def test_what_the_facade_has_is_the_object_that_the_table_names() -> None:
    for module, names in {**TABLE, **FBGEMM}.items():
        for name in names.keys() & set(shardwise.__all__):
            home, _, attribute = names[name].partition(":")
            same = getattr(shardwise, name) is getattr(import_module(home), attribute)
            assert _in_facade(module, name) == same, f"{module}.{name}"


def test_a_name_that_differs_is_linked_to_its_rows() -> None:
    entry = finding("torchrec.distributed.planner.Topology")
    assert (entry.status, entry.ours) == ("differs", "shardwise.Topology")
    assert [(row.link, row.word, row.torchrec) for row in entry.differences] == [
        ("docs/reference/differences.md#sharding", "looks", "A `Topology` assumes 32 GiB on every GPU")
    ]
    assert finding("torchrec.modules.embedding_configs.PoolingType").status == "works"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torchrec.sparse.jagged_tensor.KeyedJaggedTensors", "torchrec.sparse.jagged_tensor.KeyedJaggedTensor"),
        # the right name at the wrong place
        ("torchrec.distributed.planner.EmbeddingBagConfig", "torchrec.EmbeddingBagConfig"),
        ("torchrec.metrics.throughput.ThroughputMetric", "torchmetrics"),
        ("torchrec.modules.zzz.Quux", ""),
        ("fbgemm_gpu.split_embedding_configs.Quux", "are torch.ops.fbgemm"),
    ],
)
def test_a_name_that_we_lack_is_said_with_what_is_near(name: str, hint: str) -> None:
    entry = finding(name)
    assert (entry.status, entry.ours) == ("missing", "")
    assert hint in entry.hint and bool(hint) == bool(entry.hint)


@pytest.mark.parametrize(
    ("module", "rest", "name"),
    [
        ("torchrec", "distributed planner Topology x", "torchrec.distributed.planner.Topology"),
        ("torchrec.distributed.types", "ShardingType ROW_WISE value", "torchrec.distributed.types.ShardingType"),
        ("torchrec", "distributed", "torchrec.distributed"),
        # as an attribute it is the function, as a module it has one
        ("torchrec", "optim apply_optimizer_in_backward __doc__", "torchrec.optim.apply_optimizer_in_backward"),
        ("torchrec", "github mystery Thing method", "torchrec.github.mystery.Thing"),
        ("torchrec", "distributed __file__", "torchrec.distributed"),
        ("torchrec", "__version__", "torchrec"),
        ("torchrec", "github mystery call", "torchrec.github.mystery.call"),
        ("shardwise.torchrec.optim", "SGD", "torchrec.optim.SGD"),
        ("shardwise", "torchrec optim SGD", "torchrec.optim.SGD"),
        ("torch", "ops fbgemm jagged_to_padded_dense default", "torch.ops.fbgemm.jagged_to_padded_dense.default"),
        ("fbgemm_gpu.split_embedding_configs", "Mystery X", "fbgemm_gpu.split_embedding_configs.Mystery"),
        ("shardwise.torchrec", "install", None),
        ("shardwise", "Topology", None),
        ("torchrecs", "optim", None),
        ("torch", "optim SGD", None),
    ],
)
def test_a_chain_of_attributes_begins_with_a_name(module: str, rest: str, name: str | None) -> None:
    assert name_at(module, rest.split()) == name


def test_a_function_that_is_called_as_its_module_is_found_in_it() -> None:
    module = "torchrec.optim.apply_optimizer_in_backward"
    assert name_at(module, ["apply_optimizer_in_backward"]) == f"{module}.apply_optimizer_in_backward"
