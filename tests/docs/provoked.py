"""Every message of docs/troubleshooting.md, provoked: the pattern that the page has of it, and what a user did.

In a pattern … stands for any text. A provocation raises the error, or warns, or ends a command with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from click.testing import CliRunner
from failing_model import Fault, train
from torch import nn

import shardwise.torchrec
from shardwise import (
    DLRM,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    GradientCheckMode,
    KeyedJaggedTensor,
    LookupPolicy,
    ParameterConstraints,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    Tier,
    Topology,
    apply_optimizer_in_backward,
    checkpoint,
    cli,
    construct_module_sharding_plan,
    get_default_sharders,
    tiered,
)
from shardwise.data import Clicks, Position, restore_position
from shardwise.inference import Signature, export_model, load_program, quantize_inference_model
from shardwise.kernels import _op
from shardwise.models import auc
from shardwise.sharding import column_wise, table_wise
from shardwise.sharding.checkpoint.folder import FolderLock

ALONE = ShardingEnv.from_local(1, 0)
PROVOKED: dict[str, Callable[[], object]] = {}


def provokes(pattern: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Enter a provocation under its pattern."""

    def enter(provocation: Callable[[], object]) -> Callable[[], object]:
        assert pattern not in PROVOKED, pattern
        PROVOKED[pattern] = provocation
        return provocation

    return enter


def config(**others: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **{"num_embeddings": 6, "embedding_dim": 4, "name": "item", "feature_names": ["clicked"], **others}
    )


def tables(policy: LookupPolicy | None = None, is_weighted: bool = False, **others: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([config(**others)], is_weighted, policy=policy or LookupPolicy())


def trained(optimizer: Any = RowWiseAdagrad, settings: Any = None, **others: Any) -> EmbeddingBagCollection:
    made = tables(**others)
    apply_optimizer_in_backward(optimizer, made.parameters(), settings or {"lr": 0.1})
    return made


def batch(*ids: int, keys: Any = ("clicked",), lengths: Any = None, **others: Any) -> KeyedJaggedTensor:
    sizes = torch.tensor([len(ids)] if lengths is None else lengths)
    return KeyedJaggedTensor(list(keys), torch.tensor(ids), lengths=sizes, **others)


# batches


@provokes("feature '…' (table '…'), sample …: id … is outside [0, …)")
def _() -> object:
    return tables()(batch(6))


@provokes("features […] are not in the batch, which has […]")
def _() -> object:
    return tables()(batch(1, keys=("click",)))


@provokes("feature ids must be int32 or int64, got …")
def _() -> object:
    return tables()(KeyedJaggedTensor(["clicked"], torch.tensor([1.0]), lengths=torch.tensor([1])))


@provokes("ids are on …, the tables on …")
def _() -> object:
    return tables()(batch(1).to(torch.device("meta")))


@provokes("offsets end at … but there are … ids")
def _() -> object:
    return tables()(batch(1, 2, 3, lengths=[1, 1]))


@provokes("lengths sum to …, values has …")
def _() -> object:
    return batch(1, 2, 3, lengths=[1, 1]).to_dict()


@provokes("lengths must be of integer type, but got …")
def _() -> object:
    return batch(1, lengths=[1.0])


@provokes("… bags is not a multiple of … keys […]")
def _() -> object:
    return batch(1, 2, 3, keys=("user", "item"), lengths=[1, 1, 1])


@provokes("keys must be unique, repeated: […]")
def _() -> object:
    return batch(1, 2, keys=("user", "user"), lengths=[1, 1])


@provokes("Must provide lengths or offsets, got neither")
def _() -> object:
    return KeyedJaggedTensor(["clicked"], torch.tensor([1]))


@provokes("weights must be as many as values: got shape […] for … values")
def _() -> object:
    return batch(1, 2, weights=torch.ones(1))


@provokes("This (Keyed)JaggedTensor doesn't have weights.")
def _() -> object:
    return tables(is_weighted=True)(batch(1))


@provokes("EmbeddingBagCollection takes a KeyedJaggedTensor, got …")
def _() -> object:
    return tables()({"clicked": torch.tensor([1])})  # type: ignore[arg-type]


@provokes("unknown key '…', keys are […]")
def _() -> object:
    return tables()(batch(1))["item"]


# tables and their optimizers


@provokes("table '…': num_embeddings must be a positive int, got …")
def _() -> object:
    return config(num_embeddings=0)


@provokes("table '…': feature_names must be a list of strings, got '…'")
def _() -> object:
    return config(feature_names="clicked")


@provokes("table '…': data_type must be a DataType, DataType.FP16 say, got …")
def _() -> object:
    return config(data_type=torch.float16)


@provokes("table '…': tables train in FP32, FP16, BF16, not in …")
def _() -> object:
    return tables(data_type=DataType.INT8)


@provokes("Duplicate table name …: two tables of EmbeddingBagCollection have it")
def _() -> object:
    return EmbeddingBagCollection([config(), config()])


@provokes("table '…': a child module cannot have this name")
def _() -> object:
    return tables(name="items")


@provokes("All tables in a EmbeddingCollection are required to have same embedding dimension.")
def _() -> object:
    return EmbeddingCollection([EmbeddingConfig(6, 4, "user"), EmbeddingConfig(6, 8, "item")])


@provokes("tables …: cannot become torch.float64; fp32, fp16 and bf16 can be trained")
def _() -> object:
    return tables().double()


@provokes("table '…': … has no fused rule; these do: …")
def _() -> object:
    return trained(torch.optim.RMSprop)(batch(1))


@provokes("table '…': fused … does not take …")
def _() -> object:
    return trained(torch.optim.SGD, {"lrate": 0.1})(batch(1))


@provokes("this parameter […] already has an optimizer in the backward, …")
def _() -> object:
    return apply_optimizer_in_backward(torch.optim.SGD, trained().parameters(), {"lr": 0.1})


@provokes("feature '…' (table '…'), sample …: its gradient is … in column …; nothing changed")
def _() -> object:
    made = trained(policy=LookupPolicy(gradient_check=GradientCheckMode.RAISE))
    return (made(batch(1)).values() * torch.nan).sum().backward()


@provokes("tables […] have no optimizer: sharded, their backward trains them with SGD at lr 0.01.")
def _() -> object:
    return DistributedModelParallel(tables(), env=ALONE)


# planning and sharding


@provokes("Process group is not initialized: call torch.distributed.init_process_group, or pass env=…")
def _() -> object:
    return DistributedModelParallel(trained())


@provokes("Error initializing torch.distributed using env:// rendezvous: environment variable … expected, but not set")
def _() -> object:
    with patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        return dist.init_process_group("gloo")


@provokes("device 'cuda': there is no CUDA here, so all runs on the CPU")
def _() -> object:
    with patch("torch.cuda.is_available", lambda: False):
        return DistributedModelParallel(trained(), env=ALONE, device="cuda")


@provokes("plan must be a ShardingPlan: ShardingPlan({module path: its plan}), got …")
def _() -> object:
    return DistributedModelParallel(trained(), env=ALONE, plan={"item": None})  # type: ignore[arg-type]


@provokes("the plan names modules […], the model has […]")
def _() -> object:
    made = trained()
    plan = construct_module_sharding_plan(made, {"item": table_wise(0)}, world_size=1, local_size=1)
    return DistributedModelParallel(nn.ModuleDict({"tables": made}), env=ALONE, plan=ShardingPlan({"ebc": plan}))


@provokes("the plan misses tables […] and names unknown tables […]")
def _() -> object:
    return construct_module_sharding_plan(tables(), {"itm": table_wise(0)}, world_size=1, local_size=1)


@provokes("table '…': table_wise: rank … is not one of …")
def _() -> object:
    return construct_module_sharding_plan(tables(), {"item": table_wise(2)}, world_size=2, local_size=2)


@provokes("table '…': … columns do not divide by …: say the width of each part")
def _() -> object:
    return construct_module_sharding_plan(tables(), {"item": column_wise(ranks=[0, 1, 2])}, world_size=3, local_size=3)


def planned(rules: Any = None, rows: int = 6, **machines: Any) -> object:
    topology = Topology(**{"world_size": 2, "compute_device": "cuda", **machines})
    planner = EmbeddingShardingPlanner(topology=topology, constraints=rules)
    large = EmbeddingBagCollection([config(num_embeddings=rows)], device=torch.device("meta"))
    return planner.plan(nn.ModuleDict({"tables": large}), get_default_sharders())


@provokes("Unable to find a plan for this model because of insufficient storage.")
def _() -> object:
    return planned(rows=10**8, hbm_cap=2**20)


@provokes("table '…': sharding_types has '…': did you mean '…'?")
def _() -> object:
    return planned({"item": ParameterConstraints(sharding_types=["rowwise"])})


@provokes("constraints name tables that the model does not have: '…'")
def _() -> object:
    return planned({"itm": ParameterConstraints()})


@provokes("card '…' is not known, and hbm_cap says as much of its memory")
def _() -> object:
    return Topology(world_size=2, compute_device="cuda", card="h1000")


# tables larger than the device


@provokes("no table '…' in the module, it has […]")
def _() -> object:
    return tiered(trained(), {"itm": Tier(slots=2)})


@provokes("table '…': a table with a tier is trained by an optimizer in its backward, …")
def _() -> object:
    return tiered(tables(), {"item": Tier(slots=2)})


@provokes("Tier: slots must be a positive number of rows or a share of them, got …")
def _() -> object:
    return Tier(slots=0)


@provokes("table '…': a batch wants … distinct rows and the table may have … of its … rows on the device: …")
def _() -> object:
    made = tiered(trained(num_embeddings=1000), {"item": Tier(slots=2)})
    return made(batch(*range(100))).values()


# checkpoints and data


def saved(**others: Any) -> Path:
    return checkpoint.save(tempfile.mkdtemp(), trained(**others), step=1).path


@provokes("… does not fit the model; to load it all the same: policy=LoadPolicy(…)")
def _() -> object:
    return checkpoint.load(saved(), trained(num_embeddings=8))


@provokes("… is not there: … is no finished checkpoint")
def _() -> object:
    return checkpoint.load(saved().parent, trained())


@provokes("expected str, bytes or os.PathLike object, not NoneType")
def _() -> object:
    return checkpoint.load(checkpoint.latest(tempfile.mkdtemp()), trained())  # type: ignore[arg-type]


@provokes("… has … bytes, it was saved with …")
def _() -> object:
    path = saved()
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return checkpoint.load(path, trained())


@provokes("… has other bytes than were saved: sha256 …")
def _() -> object:
    path = saved()
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return checkpoint.load(path, trained())


@provokes("…: another save is under way there, by …: give each job a folder of its own")
def _() -> object:
    folder = Path(tempfile.mkdtemp())
    lock = FolderLock(folder)
    try:
        return checkpoint.save(folder, trained(), step=1)
    finally:
        lock.release()


@provokes("size mismatch: table '…' (…) has shape …, loaded …")
def _() -> object:
    return DistributedModelParallel(trained(), env=ALONE).load_state_dict(tables(num_embeddings=8).state_dict())


@provokes("cannot continue with the same data, which changed since the position was saved: …")
def _() -> object:
    source = Clicks(seed=0)
    return restore_position(Position.of(source, 64, epoch=0, step=1).to_json(), source, 32)


@provokes("scores and labels must be [N] both, got […] and […]")
def _() -> object:
    return auc(torch.zeros(3, 1), torch.zeros(3))


# exported models

SIGNATURE = Signature(features=["clicked"], dense=["age", "hour"])


def exported(**others: Any) -> Path:
    folder = Path(tempfile.mkdtemp()) / "served"
    model = quantize_inference_model(DLRM(tables(embedding_dim=8, **others), 2, [8], [8, 1]).eval())
    export_model(model, folder, signature=SIGNATURE)
    return folder


@provokes("the model has no quantized tables: quantize it with quantize_inference_model first")
def _() -> object:
    model = DLRM(tables(embedding_dim=8), 2, [8], [8, 1]).eval()
    return export_model(model, Path(tempfile.mkdtemp()) / "served", signature=SIGNATURE)


@provokes("… holds a model: pass force=True (--force) to replace it")
def _() -> object:
    model = quantize_inference_model(DLRM(tables(embedding_dim=8), 2, [8], [8, 1]).eval())
    return export_model(model, exported(), signature=SIGNATURE)


@provokes("… is no exported model: there is no …")
def _() -> object:
    return load_program(tempfile.mkdtemp())


@provokes("… has … bytes, it was written with …")
def _() -> object:
    folder = exported()
    file = folder / "tables.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return load_program(folder)


@provokes("this model takes dense, of shape […]")
def _() -> object:
    return load_program(exported())(torch.tensor([1]), torch.tensor([[1]]))


@provokes("TorchScript cannot take …: export it with torch.export, …")
def _() -> object:
    return torch.jit.script(tables())


# TorchRec's programs


@provokes("shardwise has no counterpart of …")
def _() -> object:
    return shardwise.torchrec.NotAName  # type: ignore[attr-defined]


# the command line and the environment


def command(*arguments: str) -> None:
    """Run it, and raise SystemExit with what it printed."""
    result = CliRunner().invoke(cli.commands(), arguments)
    raise SystemExit(f"{result.exit_code}: {result.output}")


@provokes("no such command '…': did you mean '…'?")
def _() -> object:
    return command("plann")


@provokes("say what to plan: --tables FILE or --model FILE.py:FACTORY, and --world-size N")
def _() -> object:
    return command("plan", "--world-size", "2")


@provokes("--model …: there is no file …")
def _() -> object:
    return command("export", "served", "--model", "gone.py:make")


@provokes("Invalid value for --device: torch finds no device 'cuda' here; there is cpu")
def _() -> object:
    with patch("torch.cuda.is_available", lambda: False), patch("torch.cuda.device_count", lambda: 0):
        return command("doctor", "--quick", "--device", "cuda")


@provokes("environment variable …='…': expected 0 (off) or 1 (on, as where it is not set)")
def _() -> object:
    with patch.dict(os.environ, {"SHARDWISE_NUMBA": "no"}):
        return _op._switch("SHARDWISE_NUMBA")


# ranks: what each of two does, and the timeout of an exchange


def raise_on_rank_1() -> None:
    train(Fault("loss", "raise"))


def sleep_on_rank_1() -> None:
    train(Fault("loss", "sleep"), timeout_s=3)


def plan_otherwise_on_rank_1() -> None:
    made = trained()
    where = {"item": table_wise(dist.get_rank())}
    plan = construct_module_sharding_plan(made, where, world_size=2, local_size=2)
    DistributedModelParallel(made, plan=ShardingPlan({"": plan}))


def look_up_a_bad_id_on_rank_1() -> None:
    model = DistributedModelParallel(trained())
    model(batch(6 if dist.get_rank() == 1 else 1)).values()


ON_RANKS: dict[str, Callable[[], None]] = {
    "rank … failed …: …. Rank … was …": raise_on_rank_1,
    "rank … did not come: it is …, and …": sleep_on_rank_1,
    "ranks differ in what all must share: …": plan_otherwise_on_rank_1,
    "rank …: feature '…' (table '…'), sample …: id … is outside [0, …)": look_up_a_bad_id_on_rank_1,
}
