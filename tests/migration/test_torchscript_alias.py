"""TorchScript under the alias: what programs script trains and evaluates as it is, and cannot be saved."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import DLRM, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.migration.mirror import install, uninstall
from shardwise.models import MLP

KJT = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2, 2]), torch.tensor([2, 1]))
NAMES = ("script", "trace", "trace_module", "save", "freeze", "optimize_for_inference")


@pytest.fixture
def alias() -> Iterator[None]:
    install()
    yield
    uninstall()


def dlrm() -> DLRM:
    return DLRM(EmbeddingBagCollection([EmbeddingBagConfig(8, 8, "t", feature_names=["f"])]), 4, [8], [4, 1])


def mean_of(features: KeyedJaggedTensor) -> Tensor:
    return features.values().float().mean()


class Weighted(nn.Module):
    """No tables, but a KJT in."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP(1, [2])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        output: Tensor = self.mlp(features.values().float().unsqueeze(1))
        return output


def test_a_scripted_model_with_tables_is_the_eager_one_and_trains(alias: None) -> None:
    model = dlrm()
    dense = torch.ones(2, 4)
    expected = copy.deepcopy(model)(dense, KJT)
    with pytest.warns(UserWarning, match="returns DLRM as it is.*torch.export") as seen:
        scripted = torch.jit.script(model)
        traced = torch.jit.trace(model, (dense, KJT))
        frozen = torch.jit.optimize_for_inference(torch.jit.freeze(scripted))
    # one warning, at the program's line
    assert [warning.filename for warning in seen if "as it is" in str(warning.message)] == [__file__]
    assert scripted is traced is frozen is model
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    output = scripted(dense, KJT)
    assert torch.equal(output, expected)
    output.sum().backward()
    optimizer.step()
    assert not torch.equal(scripted.eval()(dense, KJT), expected)
    # what was handed back is a module as any other
    assert torch.equal(copy.deepcopy(scripted)(dense, KJT), scripted(dense, KJT))
    assert scripted.state_dict().keys() == dlrm().state_dict().keys()


@pytest.mark.parametrize("make", [dlrm, Weighted, lambda: mean_of], ids=["tables", "jagged", "function"])
def test_saving_what_came_back_raises_with_the_way_to_export(alias: None, make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(make())
    for save in (
        lambda: scripted.save("model.pt"),
        lambda: torch.jit.save(scripted, "model.pt"),
        lambda: torch.jit.save(scripted, io.BytesIO()),
    ):
        with pytest.raises(NotImplementedError, match=r"aoti_compile_and_package.*docs/howto/export\.md"):
            save()


def test_functions_and_modules_that_take_jagged_tensors_come_back_again_and_again(alias: None) -> None:
    """The second scripting of a module's type failed with torch's "Can't redefine method"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.jit.script(mean_of)(KJT) == mean_of(KJT)
        for _ in range(2):
            module = Weighted()
            assert torch.jit.script(module) is module
        holder = nn.Sequential(Weighted())
        assert torch.jit.script(holder) is holder
        assert torch.jit.script(KeyedJaggedTensor) is KeyedJaggedTensor


def test_what_has_neither_is_scripted_by_torch(alias: None) -> None:
    scripted = torch.jit.script(MLP(3, [2]))
    assert isinstance(scripted, torch.jit.ScriptModule)
    assert isinstance(torch.jit.trace(MLP(3, [2]), (torch.ones(1, 3),)), torch.jit.ScriptModule)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(torch.ones(1, 3)), scripted(torch.ones(1, 3)))
    offset = 2

    @torch.jit.script
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    assert doubled(torch.ones(1)).item() == offset
    with pytest.raises(RuntimeError, match="(?i)unsupported|not supported|Unknown"):
        torch.jit.script(_unscriptable)


def _unscriptable(x: Tensor) -> Tensor:
    with open("nowhere") as file:
        return x + len(file.read())


def test_uninstall_gives_torchs_own_functions_back() -> None:
    before = [getattr(torch.jit, name) for name in NAMES]
    install()
    install()
    assert all(getattr(torch.jit, name) is not original for name, original in zip(NAMES, before, strict=True))
    uninstall()
    assert [getattr(torch.jit, name) for name in NAMES] == before
