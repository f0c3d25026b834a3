"""What TorchRec calls by position is the same argument here: names and order, ours behind theirs."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from shardwise.torchrec import TABLE

LISTED = Path(__file__).with_name("torchrec_arguments.txt")
CALLS = [line.split() for line in LISTED.read_text().splitlines() if not line.startswith("#")]
# last arguments that we do not take: given, they raise
WITHOUT = {"sharded_module_order_overwrite", "use_gather_select", "use_gather_select_per_sharding", "maximize",
           "extend_leaf_fqn"}  # fmt: skip
# what only sharders construct; theirs are of another engine
INTERNAL = {
    *("ShardedEmbeddingTower", "ShardedEmbeddingTowerCollection", "ShardedEmbeddingBag", "FusedOptimizer"),
    *("ShardedFeatureProcessedEmbeddingBagCollection", "ShardedQuantFeatureProcessedEmbeddingBagCollection"),
    *("ShardedManagedCollisionEmbeddingCollection", "ShardedManagedCollisionEmbeddingBagCollection"),
    "ShardedManagedCollisionCollection",
}


@pytest.mark.parametrize(("path", "name", "theirs"), [(p, n, a) for p, n, *a in CALLS], ids=[c[1] for c in CALLS])
def test_arguments_are_torchrecs_in_their_order(path: str, name: str, theirs: list[str]) -> None:
    home, _, ours = TABLE[path][name].partition(":")
    parameters = inspect.signature(getattr(import_module(home), ours)).parameters.values()
    if name in INTERNAL or any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return
    while theirs and theirs[-1] in WITHOUT:
        theirs = theirs[:-1]
    by_position = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(theirs)] == theirs
    required = [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    assert set(required) <= set(theirs), "an argument of ours has no default"
