"""Dense modules under TorchScript give their eager values; what holds tables or jagged tensors says how to export."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.scripting import TorchScriptError
from shardwise.models import (
    DLRM,
    MLP,
    CrossNet,
    DeepFM,
    DenseArch,
    FactorizationMachine,
    FMInteractionArch,
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    OverArch,
    Perceptron,
    SwishLayerNorm,
    VectorCrossNet,
    deepfm,
)

B, N, F = 5, 8, 2
X = torch.linspace(-1, 1, B * N).reshape(B, N)
SPARSE = torch.linspace(1, -2, B * F * N).reshape(B, F, N)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "swish": (lambda: SwishLayerNorm(N), (X,)),
    "perceptron": (lambda: Perceptron(N, 3), (X,)),
    "perceptron, module": (lambda: Perceptron(N, 3, activation=nn.Tanh()), (X,)),
    "mlp": (lambda: MLP(N, [4, 3]), (X,)),
    "mlp, swish": (lambda: MLP(N, [4, 3], activation="swish_layernorm"), (X,)),
    "mlp, last linear": (lambda: MLP(N, [4, 3], activation=torch.sigmoid, activation_on_last=False), (X,)),
    "mlp, no layers": (lambda: MLP(N, []), (X,)),
    "cross": (lambda: CrossNet(N, 2), (X,)),
    "low rank": (lambda: LowRankCrossNet(N, 2, 3), (X,)),
    "vector": (lambda: VectorCrossNet(N, 2), (X,)),
    "mixture": (lambda: LowRankMixtureCrossNet(N, 2, 3, 2), (X,)),
    "mixture of one": (lambda: LowRankMixtureCrossNet(N, 2, 1, 2), (X,)),
    "dense arch": (lambda: DenseArch(N, [4, N]), (X,)),
    "over arch": (lambda: OverArch(N, [4, 1]), (X,)),
    "interaction": (lambda: InteractionArch(F), (X, SPARSE)),
    "interaction of none": (lambda: InteractionArch(0), (X, SPARSE[:, :0])),
    "dcn": (lambda: InteractionDCNArch(F, LowRankCrossNet(N * (F + 1), 2, 3)), (X, SPARSE)),
    "projection": (
        lambda: InteractionProjectionArch(F, DenseArch(N * (F + 1), [2 * N]), DenseArch(N * (F + 1), [N])),
        (X, SPARSE),
    ),
    "deep half": (lambda: DeepFM(nn.Linear(2 * N, 3)), ([X, X + 1],)),
    "pairwise half": (lambda: FactorizationMachine(), ([X, X + 1],)),
    "deepfm's dense arch": (lambda: deepfm.DenseArch(N, 4, 3), (X,)),
    "deepfm's over arch": (lambda: deepfm.OverArch(N), (X,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_scripted_dense_module_gives_its_eager_values_and_gradients(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    module = make()
    scripted = torch.jit.script(module)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    gradients = []
    for run in (module, scripted, torch.jit.load(buffer)):
        output = run(*inputs)
        assert torch.equal(output, module(*inputs))
        if output.requires_grad:
            gradients.append(torch.autograd.grad(output.square().sum(), [*run.parameters()]))
    for ours, others in zip(gradients[1:], gradients[:1] * 2, strict=False):
        assert all(torch.allclose(a, b) for a, b in zip(ours, others, strict=True))


def ebc() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(8, N, "t", feature_names=["f"])])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.out = ebc(), MLP(N, [1])

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        output: Tensor = self.out(self.ebc(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values())
        return output


def takes_kjt(features: KeyedJaggedTensor) -> Tensor:
    return features.values()


def takes_list(features: list[JaggedTensor], more: KeyedTensor | None) -> Tensor:
    return features[0].values()


def makes_kjt(ids: Tensor, lengths: Tensor) -> Tensor:
    return KeyedJaggedTensor(["f"], ids, lengths=lengths).values()


@pytest.mark.parametrize(
    ("scripted", "named"),
    [
        (takes_kjt, "KeyedJaggedTensor"),
        (takes_list, "JaggedTensor"),
        (makes_kjt, "KeyedJaggedTensor"),
        (ebc(), "EmbeddingBagCollection"),
        (EmbeddingCollection([EmbeddingConfig(8, N, "t", feature_names=["f"])]), "EmbeddingCollection"),
        (Tower(), "EmbeddingBagCollection"),
        (DLRM(ebc(), 4, [N], [4, 1]), "EmbeddingBagCollection"),
        (FMInteractionArch(2 * N, ["f"], 3), "KeyedTensor"),
    ],
)
def test_scripting_tables_or_jagged_tensors_names_the_way_to_export(scripted: Any, named: str) -> None:
    """torch failed inside: "sequence item 1: expected str instance, NoneType found", "Unknown type annotation"."""
    with pytest.raises(TorchScriptError, match=f"cannot take {named}: .*torch.export.*docs/howto/export.md.*install"):
        torch.jit.script(scripted)


def test_tracing_tables_or_jagged_tensors_names_the_way_to_export() -> None:
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    with pytest.raises(TorchScriptError, match=r"torch\.export"):
        torch.jit.trace(ebc(), (KeyedJaggedTensor(["f"], ids, lengths=lengths),))
    with (
        pytest.warns(torch.jit.TracerWarning),
        pytest.raises(TorchScriptError, match=r"EmbeddingBagCollection: .*torch\.export"),
    ):
        torch.jit.trace(Tower(), (ids, lengths))


def test_what_torchscript_asks_for_is_no_attribute_for_others() -> None:
    import inspect

    for name in ("__torch_script_interface__", "_jit_override_qualname"):
        assert not hasattr(KeyedJaggedTensor, name)
    # it asks every attribute, and passes over AttributeError alone
    assert "values" in dict(inspect.getmembers(KeyedJaggedTensor))
