"""Every field that a user can give a plan: obeyed, refused when planning, or of no effect, which a warning says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingComputeKernel,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Topology,
    construct_module_sharding_plan,
    get_default_sharders,
)
from shardwise.embeddings.config import _NOT_SERVED, BaseEmbeddingConfig, EmbeddingConfig
from shardwise.inference import quantize_inference_model
from shardwise.planner import EmbeddingEnumerator, GreedyProposer, Skew, plan_tables, read_tables
from shardwise.planner.layout import SERVED_SETTINGS, TRAINED_SETTINGS, Tier
from shardwise.sharding import CacheParams, DistributedModelParallel, ParameterSharding, table_wise
from shardwise.sharding.quant import QuantEmbeddingBagCollectionSharder
from shardwise.sharding.torchrec.fused_params import KeyValueParams

CPU = Topology(1, "cpu")
OBEYED, REFUSED, IDLE = "obeyed", "refused", "no effect, with a warning"
# what the planner reads, and tests of the planner check
_READ = (
    "sharding_types", "compute_kernels", "min_partition", "pooling_factors", "num_poolings", "batch_sizes",
    "is_weighted", "ranks", "not_on", "same_rank", "skew", "device_group",
)  # fmt: skip
# field -> values, and what becomes of each for a table that trains and for a quantized one
CONSTRAINTS: dict[str, list[tuple[Any, str, str]]] = {
    **{field: [] for field in _READ},
    "cache_params": [(CacheParams(load_factor=0.1), IDLE, IDLE)],
    "enforce_hbm": [(True, OBEYED, IDLE), (False, IDLE, IDLE)],
    "stochastic_rounding": [(True, OBEYED, IDLE), (False, OBEYED, IDLE)],
    "bounds_check_mode": [(BoundsCheckMode.IGNORE, OBEYED, OBEYED), ("sometimes", REFUSED, REFUSED)],
    "feature_names": [(["f"], OBEYED, OBEYED), (["g"], IDLE, IDLE)],
    "output_dtype": [(DataType.FP16, OBEYED, REFUSED), (DataType.INT8, REFUSED, REFUSED)],
    "key_value_params": [(KeyValueParams(), IDLE, IDLE)],
    "use_virtual_table": [(True, REFUSED, REFUSED)],
    "tier": [(Tier(3), OBEYED, IDLE), (0.5, REFUSED, REFUSED)],
}
CASES = [(name, *case) for name, cases in CONSTRAINTS.items() for case in cases]
# settings of a plan that are no constraints: where the table is, and how its shards work together
PLACE = ("sharding_type", "compute_kernel", "ranks", "sharding_spec", "reduction", "row_state")


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])


def served() -> Any:
    return quantize_inference_model(bags(), output_dtype=torch.float32)


def test_every_field_says_what_becomes_of_it() -> None:
    """A field of TorchRec's could be taken and never read: `use_virtual_table` was, and no test knew."""
    assert {field.name for field in fields(ParameterConstraints)} == set(CONSTRAINTS)
    of_plans = {field.name for field in fields(ParameterSharding)} - set(PLACE)
    assert of_plans <= set(CONSTRAINTS) and of_plans <= set(TRAINED_SETTINGS) and of_plans <= set(SERVED_SETTINGS)
    assert set(TRAINED_SETTINGS) <= of_plans | {"use_virtual_table"}
    # of a table's config: read, or refused where it is made
    read = (
        "num_embeddings", "embedding_dim", "name", "data_type", "feature_names", "weight_init_max", "weight_init_min",
        "num_embeddings_post_pruning", "init_fn", "need_pos", "pooling", "enable_embedding_update",
    )  # fmt: skip
    known = {field.name for kind in (EmbeddingBagConfig, EmbeddingConfig) for field in fields(kind)}
    assert known == {*read, *_NOT_SERVED} and {field.name for field in fields(BaseEmbeddingConfig)} <= known


@pytest.mark.parametrize("what", _NOT_SERVED)
def test_a_field_of_a_config_that_nothing_serves_is_refused(what: str) -> None:
    setting: dict[str, Any] = {what: 3}
    with pytest.raises(ValueError, match=f"table 't': {what}=3 is not supported"):
        EmbeddingBagConfig(10, 8, "t", **setting)


def planned(module: Any, how: str, name: str, constraint: ParameterConstraints) -> ShardingPlan:
    """A plan with one constraint, made in one of the ways there are."""
    rules = {name: constraint}
    more: dict[str, Any] = {"options": {"proposer": GreedyProposer()}, "enumerator": {
        "enumerator": EmbeddingEnumerator(CPU, 512, rules)}}.get(how, {})  # fmt: skip
    return EmbeddingShardingPlanner(CPU, constraints=rules, **more).plan(module, get_default_sharders())


def require_words(fate: str, what: str, make: Callable[[], object], message: str) -> None:
    """A setting is refused by name, or has no effect and one warning that begins so, or is taken without a word."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if fate == REFUSED:
            refusal = rf"table 't': a plan does not set {what} \(here .*\): give the"
            with pytest.raises((PlannerError, ValueError), match=refusal) as raised:
                make()
            assert isinstance(raised.value, PlannerError) == ("constraint" in message)
            return
        make()
    words = [str(warning.message).partition(":")[0] for warning in caught if what in str(warning.message)]
    assert words == ([message] if fate == IDLE else [])


def shard(module: Any, plan: ShardingPlan) -> None:
    """What a plan is for."""
    env = ShardingEnv.from_local(1, 0)
    if isinstance(module, EmbeddingBagCollection):
        DistributedModelParallel(module, env, plan=plan, device=torch.device("cpu"))
    else:
        QuantEmbeddingBagCollectionSharder().shard(module, plan.plan[""], env)


@pytest.mark.filterwarnings("ignore:the plan's")
@pytest.mark.parametrize("how", ["ours", "options", "enumerator"])
@pytest.mark.parametrize(("what", "value", "of_trained", "of_served"), CASES)
def test_no_setting_is_silent_and_no_plan_is_made_that_sharding_refuses(
    what: str, value: Any, of_trained: str, of_served: str, how: str
) -> None:
    """`use_virtual_table` was taken without a word; `output_dtype` gave a plan that DMP refused minutes later."""
    constraint, plans = ParameterConstraints(**{what: value}, sharding_types=["table_wise"]), list[ShardingPlan]()
    for module, fate in ((bags(), of_trained), (served(), of_served)):
        make = partial(planned, module, how, "t", constraint)
        require_words(
            fate, what, lambda make=make: plans.append(make()), f"the constraint {what} of tables 't' has no effect"
        )
        if fate != REFUSED:
            shard(module, plans[-1])


@pytest.mark.parametrize(("what", "value", "of_trained", "of_served"), CASES)
def test_a_plan_made_by_hand_meets_the_same_words(what: str, value: Any, of_trained: str, of_served: str) -> None:
    if what not in {field.name for field in fields(ParameterSharding)}:
        return
    for module, fate, kernel in ((bags(), of_trained, "fused"), (served(), of_served, "quant")):
        sharder = None if kernel == "fused" else QuantEmbeddingBagCollectionSharder()
        of_module = construct_module_sharding_plan(
            module, {"t": table_wise(0, compute_kernel=kernel)}, sharder, world_size=1, device_type="cpu"
        )
        setattr(of_module["t"], what, value)
        made = partial(shard, module, ShardingPlan({"": of_module}))
        require_words(fate, what, made, f"the plan's {what} (table 't') has no effect")


def test_settings_for_all_tables_are_told_once_and_travel() -> None:
    tables = [EmbeddingBagConfig(10, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(12)]
    planner = EmbeddingShardingPlanner(CPU, constraints={"*": ParameterConstraints(enforce_hbm=False)})
    with pytest.warns(UserWarning, match="constraint enforce_hbm of tables 't0', .*'t7', ... has no effect") as caught:
        plan = planner.plan(EmbeddingBagCollection(tables), get_default_sharders())
    assert len([warning for warning in caught if "enforce_hbm" in str(warning.message)]) == 1
    assert {sharding.enforce_hbm for sharding in plan.plan[""].values()} == {False}


@pytest.mark.parametrize("rules", [{"*": ParameterConstraints(min_partition=4)}, {
    "t": ParameterConstraints(skew=Skew(1.0))}])  # fmt: skip
def test_what_only_our_search_reads_is_refused_beside_parts_of_torchrecs(rules: dict[str, Any]) -> None:
    """TorchRec's enumerator looks tables up by their names: what was said of '*' was passed over, as was skew."""
    with pytest.raises(ValueError, match="constraint .*has no effect with an enumerator, proposer"):
        EmbeddingShardingPlanner(CPU, constraints=rules, proposer=GreedyProposer())


def test_a_callback_cannot_make_a_plan_that_sharding_refuses() -> None:
    def narrow(options: list[Any]) -> list[Any]:
        options[0].output_dtype = DataType.INT8
        return options

    planner = EmbeddingShardingPlanner(CPU, callbacks=[narrow])
    with pytest.raises(PlannerError, match="table 't': a plan does not set output_dtype"):
        planner.plan(bags(), get_default_sharders())


@pytest.mark.parametrize(("what", "value", "message"), [
    ("sharding_types", [ShardingType.TABLE_WISE], r"has <ShardingType.*: did you mean 'table_wise'"),
    ("compute_kernels", [EmbeddingComputeKernel.FUSED], r"has <EmbeddingComputeKernel.*: did you mean 'fused'"),
    ("sharding_types", "table_wise", r"must be a list, got 'table_wise': write \['table_wise'\]"),
])  # fmt: skip
def test_an_enum_or_a_bare_word_in_the_place_of_values_is_refused_by_name(what: str, value: Any, message: str) -> None:
    """`ShardingType.TABLE_WISE` without `.value` ended in an AttributeError about `lower`, a bare word in letters."""
    with pytest.raises(PlannerError, match=f"table 't': {what} {message}"):
        planned(bags(), "ours", "t", ParameterConstraints(**{what: value}))


def test_an_empty_list_of_types_or_kernels_allows_all() -> None:
    """It allowed none, and no plan was found; TorchRec takes it as no constraint."""
    plan = planned(bags(), "ours", "t", ParameterConstraints(sharding_types=[], compute_kernels=[]))
    assert plan == planned(bags(), "ours", "t", ParameterConstraints())


def test_a_device_group_is_a_device() -> None:
    with pytest.raises(PlannerError, match="table 't': device_group must be one of cpu, cuda, mtia, got 'gpu'"):
        planned(bags(), "ours", "t", ParameterConstraints(device_group="gpu"))


@pytest.mark.parametrize(("what", "value", "fate"), [
    ("use_virtual_table", True, REFUSED), ("output_dtype", "int8", REFUSED), ("output_dtype", "fp16", OBEYED),
    ("stochastic_rounding", False, OBEYED), ("enforce_hbm", False, IDLE), ("tier", {"slots": 0.1}, OBEYED),
])  # fmt: skip
def test_files_of_constraints_meet_the_same_words(tmp_path: Path, what: str, value: Any, fate: str) -> None:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    from click.testing import CliRunner

    from shardwise import cli

    (tmp_path / "tables.json").write_text(json.dumps([{"name": "t", "num_embeddings": 10, "embedding_dim": 8}]))
    (tmp_path / "rules.json").write_text(json.dumps({"*": {what: value}}))
    arguments = ["plan", "--tables", str(tmp_path / "tables.json"), "--constraints", str(tmp_path / "rules.json"),
                 "--world-size", "2", "--device", "cpu"]  # fmt: skip
    if fate == REFUSED:
        ended = CliRunner().invoke(cli.commands(), arguments)
        assert ended.exit_code == 2 and f"table 't': a plan does not set {what} (here" in " ".join(ended.output.split())
    else:
        ended = CliRunner().invoke(cli.commands(), arguments)
        told = f"constraint {what} of tables 't' has no effect" in " ".join(ended.stderr.split())
        assert ended.exit_code == 0 and told == (fate == IDLE)


def test_a_plan_for_comparison_says_that_it_cannot_be_trained(tmp_path: Path) -> None:
    """TorchRec's formulas choose kernels that the engine does not run; training refused the file much later."""
    file = tmp_path / "tables.json"
    file.write_text(json.dumps([{"name": "t", "num_embeddings": 10**8, "embedding_dim": 128}]))
    rules = {"t": ParameterConstraints(compute_kernels=["ssd_virtual_table"], sharding_types=["table_wise"])}
    small = Topology(2, "cuda", hbm_cap=2**30, local_world_size=2)
    with pytest.warns(UserWarning, match="tables 't' have compute_kernel 'ssd_virtual_table', .* refuses"):
        plan_tables(read_tables(file), small, 512, cost="torchrec", constraints=rules)
