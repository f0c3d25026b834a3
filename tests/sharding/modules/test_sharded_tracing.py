"""Modules over ranks in graphs of torch.fx: each is one node, whichever tracer runs, that learns as the module does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_batches import kjt
from model_zoo import BAGS, MAKERS, values_of
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import DistributedModelParallel, KeyedJaggedTensor, apply_optimizer_in_backward, get_default_sharders
from shardwise.sharding.dmp.tracing import symbolic_trace
from shardwise.sharding.modules.embedding_bag import EmbeddingBagSharder

pytestmark = pytest.mark.ranks


class Inside(nn.Module):
    """A module that makes its own batch, and a dense layer beside it, so that it is wrapped."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.module, self.behind_maps = MAKERS[kind]("cpu"), "behind maps" in kind
        self.dense = nn.Linear(1, 1)

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor, dense: Tensor) -> Any:
        found = self.module(KeyedJaggedTensor(list(BAGS), values, weights, lengths))
        return found[0] if self.behind_maps else found, self.dense(dense)


class Bag(nn.Module):
    """A bag of torch's own that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", include_last_offset=True)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.bag(features.values(), features.offsets()) * 2  # type: ignore[no-any-return]


def features() -> KeyedJaggedTensor:
    return kjt(BAGS, weights=torch.arange(1.0, 8.0))


def arguments() -> list[Tensor]:
    batch = features()
    return [batch.values(), batch.lengths(), batch.weights(), torch.ones(3, 1)]


def trains_alike(model: Any, twin: Any, given: Any) -> bool:
    """Whether two modules give the same in three steps, in each of which the tables of both learn."""
    outputs: list[list[Tensor]] = [[], []]
    for _ in range(3):
        for module, own in zip((model, twin), outputs, strict=True):
            output = module(*given)
            beside = output[1].sum() if isinstance(output, tuple) and output[1] is not None else 0.0
            looked_up = values_of(output)
            (looked_up.float().square().sum() + beside).backward()  # type: ignore[no-untyped-call]
            own.append(looked_up.detach().clone())
    changed = not torch.equal(outputs[0][0], outputs[0][2])
    return changed and all(map(torch.equal, *outputs))


def pair(make: Callable[[], nn.Module]) -> list[DistributedModelParallel]:
    """Two models over ranks with the same weights and states."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        module = make()
        tables = [param for name, param in module.named_parameters() if "embedding" in name]
        if not any(getattr(table, "_optimizer_classes", None) for table in tables):
            apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.1})
        models.append(DistributedModelParallel(module))
    return models


def traced() -> dict[str, bool]:
    """Whether what is traced does as what is not: as children of a model, and as roots."""
    same = {}
    for kind in KINDS:
        model, twin = pair(lambda kind=kind: Inside(kind))  # type: ignore[misc]
        same[kind] = trains_alike(torch.fx.symbolic_trace(model.module), twin, arguments())
    for kind in ("bags", "rows behind maps", "feature processors"):
        for trace in (torch.fx.symbolic_trace, symbolic_trace):
            model, twin = pair(lambda kind=kind: MAKERS[kind]("cpu"))  # type: ignore[misc]
            same[f"{kind}, {trace.__module__}"] = trains_alike(trace(model.module), twin, [features()])
    model, twin = pair(lambda: Inside("bags behind maps"))
    same["wrapped"] = trains_alike(symbolic_trace(model), twin, arguments())
    return same


KINDS = [kind for kind in MAKERS if kind != "model"]


def test_a_traced_module_over_ranks_looks_up_and_trains_as_the_module() -> None:
    """With torch's tracer these read a proxy as though it were a batch: "takes a KeyedJaggedTensor, got Proxy"."""
    for same in run_ranks(2, traced):
        assert len(same) == len(KINDS) + 7
        assert same == dict.fromkeys(same, True)


def nodes_and_errors() -> tuple[list[str], bool, str]:
    sharders: Any = [*get_default_sharders(), EmbeddingBagSharder()]
    bag, twin = (DistributedModelParallel(Bag(), sharders=sharders) for _ in range(2))
    traced = torch.fx.symbolic_trace(bag.module)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    return calls, trains_alike(traced, twin, [features()]), error_of(torch.fx.symbolic_trace, bag)


def test_a_sharded_bag_is_a_node_and_a_wrapped_model_names_the_tracer_that_knows_it() -> None:
    for calls, same, error in run_ranks(2, nodes_and_errors):
        assert calls == ["bag"] and same
        assert error.startswith("TraceError: DistributedModelParallel passes on whatever arguments it is given")
        assert "torchrec.fx.symbolic_trace" in error and "model.module" in error
