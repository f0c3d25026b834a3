"""Two nodes train together by the files of examples/launch, and go on after one of them was killed.

Takes half a minute: a run is two launchers and four ranks, processes of their own that import torch. Nodes are network
namespaces where some can be made, else loopback addresses.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from optional import need
from ranks import run_ranks

from shardwise.perf.evidence.nodes import two_nodes as evidence
from shardwise.perf.evidence.nodes.machine import TwoNodes, namespaces_can_be_made

LAUNCH = ROOT / "examples" / "launch"
SHORT = 4


def module(name: str) -> Any:
    """A module of examples/launch."""
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def losses_here(*arguments: str) -> list[float]:
    """What a rank of this machine gets."""
    two_nodes = module("two_nodes")
    losses: list[float] = two_nodes.train(two_nodes.parse([*arguments]))
    return losses


@cache
def expected(steps: int) -> list[float]:
    """Of four ranks of one machine that are told to be two nodes."""
    first, *others = run_ranks(4, losses_here, f"--steps={steps}", "--node-ranks=2")
    assert others == [first] * 3
    return first


def nodes_in(folder: Path) -> TwoNodes:
    return TwoNodes(folder, namespaces=namespaces_can_be_made())


def new_run(folder: Path, nodes: TwoNodes) -> evidence.Run:
    return evidence.Run(folder, nodes, steps=12)


@pytest.mark.ranks
def test_slurms_script_trains_two_nodes_to_the_bits_of_four_ranks_of_one(tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    with nodes_in(tmp_path) as nodes:
        starts = [
            " ".join([f"SLURM_NODEID={node}", *own(nodes, node), *nodes.inside(node), '"$@"', "&"]) for node in range(2)
        ]
        shim(tmp_path, "srun", "while [[ $1 == --* ]]; do shift; done", *starts, "wait -n && wait -n")
        # whoever reads the first name alone is gone when the second comes
        names = f'echo "{nodes.addresses[0]}"; sleep 0.2; echo other'
        shim(tmp_path, "scontrol", f'[[ "$*" == "show hostnames n[0-1]" ]] && {{ {names}; }}')
        of_slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2"}
        path = f"{tmp_path}:{nodes.environment(0, {})['PATH']}"
        program = ["examples/launch/two_nodes.py", f"--steps={SHORT}", f"--losses={losses}"]
        script = ["bash", str(LAUNCH / "slurm.sbatch"), *program]
        nodes.start(0, script, {**of_slurm, "PATH": path}, outside=True)
        assert nodes.ended(evidence.END_S) == [0], nodes.printed()
    begin, *lines = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [line["loss"] for line in lines] == expected(SHORT)
    # rows within a node, columns within a node, and a table over all of them
    assert begin["of"] in (
        {"user": [2, 3], "item": [0, 1], "seen": [0, 1, 2, 3]},
        {"user": [0, 1], "item": [2, 3], "seen": [0, 1, 2, 3]},
    )


def own(nodes: TwoNodes, node: int) -> list[str]:
    """The address of a node, where it cannot find it by itself."""
    return [] if nodes.namespaces else [f"LOCAL_ADDR={nodes.addresses[node]}"]


def shim(folder: Path, name: str, *lines: str) -> None:
    """A program that stands for one of Slurm's."""
    path = folder / name
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(0o755)


@pytest.mark.ranks
def test_four_ranks_and_two_have_the_losses_of_one_process() -> None:
    """`train_loop` is what Ray calls on each worker, in a process group that is there."""
    (alone,) = run_ranks(1, losses_here, f"--steps={SHORT}")
    assert expected(SHORT) == pytest.approx(alone, abs=1e-5) and expected(SHORT) != [alone[0]] * SHORT
    for losses, reported in run_ranks(2, loop_of_ray, f"--steps={SHORT}"):
        assert losses == pytest.approx(alone, abs=1e-5)
        assert reported == [{"loss": losses[-1], "steps": float(SHORT)}]


def loop_of_ray(*arguments: str) -> tuple[list[float], list[dict[str, float]]]:
    """What `ray_train.py` does on a worker, without Ray."""
    reported: list[dict[str, float]] = []
    losses = module("ray_train").train_loop({"arguments": [*arguments]}, reported.append)
    return losses, reported


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_node_that_comes_back_goes_on_with_the_same_losses(tmp_path: Path, node: int) -> None:
    with nodes_in(tmp_path) as nodes:
        seen = evidence.node_killed(new_run(tmp_path, nodes), node)
    assert seen["statuses"] == [0, 0]
    # a checkpoint every 5 steps, and the node was killed after step 8
    assert seen["generations"] == [{"step": 0, "ranks": 4}, {"step": 5, "ranks": 4}] or node == 0
    assert len(seen["generations"]) > 1 and seen["losses"] == expected(12)


@pytest.mark.ranks
@pytest.mark.full
def test_ranks_of_both_nodes_say_who_is_gone_when_the_cable_is_cut(tmp_path: Path) -> None:
    if not namespaces_can_be_made():
        pytest.skip("no network namespaces can be made here, and nobody can cut the loopback interface")
    with nodes_in(tmp_path) as nodes:
        run = new_run(tmp_path, nodes)
        run.start(0, 1)
        run.wait_for_step(3)
        nodes.cut()
        # on a busy machine it takes longer than the bound that the evidence holds it to
        nodes.wait(lambda: names_others(nodes, 0) and names_others(nodes, 1), 150.0, "errors of both nodes")


def names_others(nodes: TwoNodes, node: int) -> bool:
    """Whether a rank of a node says that one of the other node's is gone.

    Which depends on whom it waited for; its neighbour may only see that it ended itself.
    """
    others = "[01]" if node else "[23]"
    return any(re.search(rf": .*\branks? \[?{others}\b", text) for text in evidence.failures(nodes, node))


def manifests() -> dict[str, Any]:
    """What kubernetes.yaml asks for, by its kind."""
    return {one["kind"]: one for one in need("yaml").safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}


@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_kubernetes_takes_the_manifest(kind: str) -> None:
    validate = need("kubernetes_validate")
    for version in ("1.31", validate.latest_version()):
        validate.validate(manifests()[kind], version, strict=True)


def test_pods_find_pod_0_by_the_name_that_the_command_has() -> None:
    service, job = manifests()["Service"], manifests()["Job"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    launcher, index, nodes, address, *_ = container["args"][0].removeprefix("exec ").split()
    assert (launcher, index, nodes) == ("examples/launch/torchrun.sh", '"$JOB_COMPLETION_INDEX"', '"$NODES"')
    assert address == f"{name}-0.{pod['subdomain']}"
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["NODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert environment["RANKS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    (port,) = {service["spec"]["ports"][0]["port"], container["ports"][0]["containerPort"]}
    assert f"${{PORT:-{port}}}" in (LAUNCH / "torchrun.sh").read_text()


@pytest.mark.ranks
@pytest.mark.full
def test_the_pods_command_trains_two_nodes(tmp_path: Path) -> None:
    (container,) = manifests()["Job"]["spec"]["template"]["spec"]["containers"]
    losses = tmp_path / "losses"
    (command,) = container["args"]
    command = command.split(" examples/dlrm/train.py ")[0]
    command += f" examples/launch/two_nodes.py --steps={SHORT} --losses={losses}"
    with nodes_in(tmp_path) as nodes:
        command = command.replace("shardwise-0.shardwise", nodes.addresses[0])
        of_pod = {one["name"]: one["value"] for one in container["env"] if "value" in one} | {"RANKS": "2"}
        for index in range(2):
            pod = {**of_pod, "JOB_COMPLETION_INDEX": str(index), "LOCAL_ADDR": nodes.addresses[index]}
            nodes.start(index, [*container["command"], command], pod)
        assert nodes.ended(evidence.END_S) == [0, 0], nodes.printed()
    lines = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == expected(SHORT)


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_shells_find_nothing_wrong_with_the_scripts(script: str) -> None:
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists() and not os.environ.get("SHARDWISE_REQUIRE_ALL"):
        pytest.skip("shellcheck is not installed: `make dev` brings it")
    done = subprocess.run([shellcheck, LAUNCH / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_too_few_arguments_are_told_what_is_missing() -> None:
    done = subprocess.run([LAUNCH / "torchrun.sh", "0", "2", "10.0.0.1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: torchrun.sh NODE NODES ADDRESS PROGRAM [ARGUMENT ...]\n")


def test_the_pages_torchrun_is_that_of_the_script() -> None:
    page, script = (ROOT / "docs/howto/launch.md").read_text(), (LAUNCH / "torchrun.sh").read_text()
    written_out = page.split("torchrun --nnodes")[1].split("```")[0]
    used = set(re.findall(r"--[\w-]+=", f"--nnodes={written_out.split(' examples/')[0]}"))
    assert used == set(re.findall(r"--[\w-]+=", script))
    settings = {*re.findall(r"\$\{([A-Z_]+):-\w", script), "LOCAL_ADDR"}
    assert {*re.findall(r"^\| `([A-Z_]+)(?:=\w+)?` \|", page, re.MULTILINE)} == settings


def test_the_page_has_the_numbers_of_the_recorded_runs() -> None:
    recorded = json.loads(evidence.RESULT.read_text())
    page = (ROOT / "docs/howto/launch.md").read_text()
    assert [row for row in evidence.table(recorded["runs"]) if row not in page] == []
    for name, run in recorded["runs"].items():
        assert run["from one process at most"] <= 1e-5 and not any(run["statuses"]), name
        # fewer ranks for a while add dense gradients in another order
        assert run["same bits"] or name.startswith("--nnodes=1:2")
