"""TorchRec's four tutorial programs run as they are through `python -m shardwise.torchrec`, and print what they should.

The programs compare their own answers with rows picked by hand; a wrong row ends them.

Takes most of a minute: the programs start two processes each, as users do, which import torch.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT, without_gloo

PROGRAMS = Path(__file__).with_name("tutorials")
LARGE, SMALL = ["large_table_0", "large_table_1"], ["small_table_0", "small_table_1"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "shardwise.torchrec", str(PROGRAMS / f"{program}.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr
    result.stdout = without_gloo(result.stdout)
    return result


def rows_of(printed: str, header: str) -> list[list[str]]:
    """The first table of `printed` whose header line begins with these columns."""
    lines = printed.splitlines()
    start = next(n for n, line in enumerate(lines) if re.sub(r"\s+", " ", line.strip()).startswith(header))
    body = lines[start + 2 :]
    end = next(n for n, line in enumerate(body) if "|" not in line)
    return [[cell.strip() for cell in line.split("|")] for line in body[:end]]


def test_the_introduction_prints_its_model_plan_batch_and_rows(tmp_path: Path) -> None:
    result = run("introduction", folder=tmp_path)
    out = result.stdout
    assert out.startswith("DistributedModelParallel(\n  (_dmp_wrapped_module): ShardedEmbeddingBagCollection(\n")
    assert rows_of(out, "param | sharding type") == [
        ["product_table", "table_wise", "fused", "[0]"],
        ["user_table", "table_wise", "fused", "[0]"],
    ]
    assert [row[2] for row in rows_of(out, "param | shard offsets")] == ["[4096, 64]"] * 2
    batch = 'KeyedJaggedTensor({\n    "product": [[101, 202], [], [303]],\n    "user": [[404], [505], [606]]\n})'
    assert batch in out
    # the second sample has no product
    assert re.search(r'KeyedTensor\(\{\n    "product": \[\[[-0-9.e, ]+\], \[(0\.0, ){63}0\.0\], \[', out)
    assert "keys: ['product', 'user'] equal to the sums by hand" in out
    # asked for cuda, on a machine without it
    assert result.stderr.count("there is no CUDA here, so all runs on the CPU") == 1


def test_the_introduction_by_module_paths_trains_the_rows_it_looked_up(tmp_path: Path) -> None:
    out = run("introduction_by_path", folder=tmp_path).stdout
    assert [row[1] for row in rows_of(out, "param | sharding type")] == ["table_wise"] * 2
    assert "product_table moved rows [101, 202, 303]\nuser_table moved rows []\n" in out


@pytest.mark.parametrize(
    ("sharding_type", "kernel", "cuts"),
    [
        # their programs differ from the others' by a word
        pytest.param("TABLE_WISE", "fused", {"large": ["[4096, 64]"], "small": ["[1024, 64]"]}, marks=pytest.mark.full),
        ("ROW_WISE", "fused", {"large": ["[2048, 64]"] * 2, "small": ["[512, 64]"] * 2}),
        pytest.param(
            "COLUMN_WISE", "fused", {"large": ["[4096, 32]"] * 2, "small": ["[1024, 32]"] * 2}, marks=pytest.mark.full
        ),
        pytest.param("DATA_PARALLEL", "dense", {}, marks=pytest.mark.full),
    ],
)
def test_the_sharding_tutorial_prints_the_plan_of_each_type(
    sharding_type: str, kernel: str, cuts: dict[str, list[str]], tmp_path: Path
) -> None:
    out = run("sharding", sharding_type, folder=tmp_path).stdout
    tables = rows_of(out, "param | sharding type")
    assert [row[:3] for row in tables] == [[name, sharding_type.lower(), kernel] for name in [*LARGE, *SMALL]]
    whole = sharding_type == "TABLE_WISE"
    # two large and two small tables: one of each on every rank
    assert [row[3] for row in tables] == (["[0]", "[1]"] * 2 if whole else ["[0, 1]"] * 4)
    if cuts:
        shards = rows_of(out, "param | shard offsets")
        assert {name: [row[2] for row in shards if row[0] == name] for name in [*LARGE, *SMALL]} == {
            name: cuts[name.split("_")[0]] for name in [*LARGE, *SMALL]
        }
        places = {row[3] for row in shards}
        assert places == {"rank:0/cuda:0", "rank:1/cuda:1"}
    for rank in (0, 1):
        assert f"rank:{rank},sharding plan: " in out
        assert f"rank:{rank},answers are those of the unsharded tables" in out


def test_the_announcements_snippet_plans_shards_quantizes_and_serves(tmp_path: Path) -> None:
    out = run("announcement", folder=tmp_path).stdout
    assert 'KeyedJaggedTensor({\n    "user": [[1], [2, 3]],\n    "item": [[5], [6]]\n})' in out
    assert "unsharded: KeyedTensor ['user', 'item']" in out
    assert {row[3] for row in rows_of(out, "param | sharding type")} == {"[0]", "[1]"}
    assert "QuantizedEmbeddingBagCollection(" in out
    assert "sharded and quantized: ['user', 'item'] off by less than 0.01: True" in out
