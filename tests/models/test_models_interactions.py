"""Layers and models against their formulas, written out sample by sample; gradients against finite differences."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from shardwise.models import (
    DLRM_DCN,
    MLP,
    CrossNet,
    DeepFM,
    DLRM_Projection,
    DLRMWrapper,
    FactorizationMachine,
    FMInteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    LazyModuleExtensionMixin,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    Perceptron,
    SimpleDeepFMNN,
    SimpleDeepFMNNWrapper,
    SwishLayerNorm,
    VectorCrossNet,
    choose,
    lazy_apply,
)

BATCH, DENSE, DIM = 4, 3, 2


def collection(dims: tuple[int, ...] = (DIM, DIM)) -> EmbeddingBagCollection:
    """Two tables; the second serves two features and averages, one of them the first table's too."""
    features = [["a"], ["b", "a"]]
    return EmbeddingBagCollection([
        EmbeddingBagConfig(
            name=f"t{t}", num_embeddings=5, embedding_dim=dim, feature_names=features[t],
            pooling=PoolingType.MEAN if t else PoolingType.SUM,
        )
        for t, dim in enumerate(dims)
    ])  # fmt: skip


@dataclass
class Input:
    """A batch as TorchRec's test models take it."""

    float_features: Tensor
    idlist_features: KeyedJaggedTensor
    label: Tensor


def batch() -> Input:
    torch.manual_seed(1)
    lengths = torch.tensor([1, 0, 2, 1, 0, 3, 1, 1])
    ids = torch.randint(0, 5, (9,))
    kjt = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths)
    return Input(torch.randn(BATCH, DENSE), kjt, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def embedded(model: nn.Module, given: Input) -> Tensor:
    """Pooled embeddings [B, F, D] in the order of tables and their features."""
    ebc: Any = model.sparse_arch
    values: Tensor = ebc.embedding_bag_collection(given.idlist_features).values()
    return values.view(BATCH, 3, DIM)


def deepfm(model: Any, given: Input) -> Tensor:
    """By hand: two dense layers, one deep layer, all pairs one by one, a linear layer and a sigmoid."""
    first, _, second, _ = model.dense_arch.model
    dense = F.relu(second(F.relu(first(given.float_features))))
    numbers = torch.cat([dense, embedded(model, given).flatten(1)], dim=1)
    deep = F.relu(model.inter_arch.deep_fm.dense_module[0](numbers))
    pairs = sum(numbers[:, i] * numbers[:, j] for i, j in combinations(range(numbers.shape[1]), 2))
    last = model.over_arch.model[0]
    return torch.sigmoid(last(torch.cat([dense, deep, torch.as_tensor(pairs)[:, None]], dim=1)))


def dense_and_together(model: Any, given: Input) -> tuple[Tensor, Tensor]:
    dense = model.dense_arch(given.float_features)
    return dense, torch.cat([dense, embedded(model, given).flatten(1)], dim=1)


def cross(model: Any, given: Input) -> Tensor:
    _, together = dense_and_together(model, given)
    return model.over_arch(model.inter_arch.crossnet(together))  # type: ignore[no-any-return]


def projected(model: Any, given: Input) -> Tensor:
    dense, together = dense_and_together(model, given)
    left, right = model.inter_arch.interaction_branch1(together), model.inter_arch.interaction_branch2(together)
    # rows of p vectors, columns of a [D, q] matrix
    products = [sum(left[:, i * DIM + d] * right[:, d * 3 + j] for d in range(DIM)) for i in range(2) for j in range(3)]
    pairs = torch.stack([torch.as_tensor(p) for p in products], 1)
    return model.over_arch(torch.cat([dense, pairs], dim=1))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "deepfm": (lambda: SimpleDeepFMNN(DENSE, collection(), 6, 5), deepfm),
    "dcn": (lambda: DLRM_DCN(collection(), DENSE, [4, DIM], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=3), cross),
    "projection": (lambda: DLRM_Projection(collection(), DENSE, [4, DIM], [5, 1], [7, 2 * DIM], [3 * DIM]), projected),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_what_their_formula_says_and_every_weight_learns(name: str) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name][0](), batch()
    out = model(given.float_features, given.idlist_features)
    assert out.shape == (BATCH, 1)
    torch.testing.assert_close(out, MODELS[name][1](model, given))
    out.sum().backward()
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads.values()), grads


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "deepfm": lambda: SimpleDeepFMNNWrapper(DENSE, collection(), 6, 5),
    "dlrm": lambda: DLRMWrapper(collection(), DENSE, [4, DIM], [5, 1]),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_give_the_loss_while_training(make: Callable[[], nn.Module]) -> None:
    model, given = make(), batch()
    loss, prediction = model(given)
    wanted = F.binary_cross_entropy_with_logits(prediction[:, 0], given.label)
    torch.testing.assert_close(loss, wanted)
    assert torch.equal(model.eval()(given), prediction)


def test_a_factorization_machine_adds_the_products_of_all_pairs() -> None:
    embeddings = [torch.randn(3, 2, 2), torch.randn(3, 1)]
    numbers = torch.cat([e.flatten(1) for e in embeddings], dim=1)
    wanted = torch.stack([numbers[:, i] * numbers[:, j] for i, j in combinations(range(5), 2)]).sum(0)
    torch.testing.assert_close(FactorizationMachine()(embeddings)[:, 0], wanted)
    layer = nn.Linear(5, 2)
    assert torch.equal(DeepFM(layer)(embeddings), layer(numbers))


def test_without_sparse_features_the_dense_ones_pass() -> None:
    dense, nothing = torch.randn(3, DIM), torch.empty(3, 0, DIM)
    for arch in (
        InteractionDCNArch(0, nn.Linear(1, 1)),
        InteractionProjectionArch(0, nn.Identity(), nn.Identity()),
        FMInteractionArch(2, [], 1),
    ):
        assert arch(dense, nothing) is dense


def test_empty_batches_pass() -> None:
    kjt = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.empty(0, dtype=torch.int64), torch.empty(0).long())
    for make, _ in MODELS.values():
        assert make()(torch.empty(0, DENSE), kjt).shape == (0, 1)


def test_choose_counts() -> None:
    assert [choose(5, k) for k in range(-1, 7)] == [0, 1, 5, 10, 10, 5, 1, 0]


def test_dense_layers_go_where_they_are_told() -> None:
    model = DLRM_DCN(collection(), DENSE, [DIM], [5, 1], 1, 1, dense_device="meta")
    assert {p.device.type for n, p in model.named_parameters() if "embedding_bag" not in n} == {"meta"}


def full_cross(net: CrossNet, x0: Tensor) -> Tensor:
    x = x0
    for w, b in zip(net.kernels, net.bias, strict=True):
        x = x0 * (w @ x + b[:, 0]) + x
    return x


def low_rank(net: LowRankCrossNet, x0: Tensor) -> Tensor:
    x = x0
    for w, v, b in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        x = x0 * (w @ (v @ x) + b) + x
    return x


def vector_cross(net: VectorCrossNet, x0: Tensor) -> Tensor:
    x = x0
    for w, b in zip(net.kernels, net.bias, strict=True):
        x = x0 * torch.dot(w[:, 0], x) + b[:, 0] + x
    return x


def mixture(net: LowRankMixtureCrossNet, x0: Tensor) -> Tensor:
    x = x0
    for u, v, c, b in zip(net.U_kernels, net.V_kernels, net.C_kernels, net.bias, strict=True):
        g = net._activation
        experts = [x0 * (u[k] @ g(c[k] @ g(v[k] @ x)) + b[:, 0]) for k in range(len(u))]
        shares = [1.0] if net.gates is None else torch.cat([gate(x) for gate in net.gates]).softmax(0)
        x = sum((share * expert for share, expert in zip(shares, experts, strict=True)), x)
    return x


# name -> network, its formula for one sample, and its parameters by name
CROSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, list[int]]]] = {
    "full": (lambda: CrossNet(6, 2), full_cross, {"kernels.1": [6, 6], "bias.1": [6, 1]}),
    "no layers": (lambda: CrossNet(6, 0), full_cross, {}),
    "low rank": (
        lambda: LowRankCrossNet(6, 3),
        low_rank,
        {"W_kernels.2": [6, 1], "V_kernels.2": [1, 6], "bias.2": [6]},
    ),
    "rank 4": (lambda: LowRankCrossNet(6, 1, 4), low_rank, {"W_kernels.0": [6, 4], "V_kernels.0": [4, 6]}),
    "vector": (lambda: VectorCrossNet(6, 2), vector_cross, {"kernels.0": [6, 1], "bias.0": [6, 1]}),
    "one expert": (lambda: LowRankMixtureCrossNet(6, 2), mixture, {"U_kernels.1": [1, 6, 1], "C_kernels.1": [1, 1, 1]}),
    "experts": (
        lambda: LowRankMixtureCrossNet(6, 2, num_experts=3, low_rank=2, activation=torch.tanh),
        mixture,
        {"U_kernels.1": [3, 6, 2], "V_kernels.0": [3, 2, 6], "C_kernels.1": [3, 2, 2], "gates.2.weight": [1, 6]},
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = CROSSES[name][0]()
    for parameter in net.parameters():
        # biases begin at 0, where mistakes with them would not show
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("name", CROSSES)
def test_layers_follow_their_formula(name: str) -> None:
    net, x = made(name), torch.randn(5, 6)
    wanted = torch.stack([CROSSES[name][1](net, row) for row in x])
    torch.testing.assert_close(net(x), wanted)
    assert net(x[:0]).shape == (0, 6)
    shapes = {key: list(value.shape) for key, value in net.state_dict().items()}
    assert CROSSES[name][2].items() <= shapes.items()


@pytest.mark.parametrize("name", [name for name in CROSSES if name != "one expert"])
def test_gradients_are_those_of_the_values(name: str) -> None:
    net, x = made(name).double(), torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    names, parameters = [*dict(net.named_parameters())], [*net.parameters()]

    def run(given: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (given,))
        return out

    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_biases_begin_at_zero() -> None:
    assert not any(bias.any() for bias in LowRankCrossNet(4, 2).bias)


def by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    state = layer.state_dict()
    return x @ state["_linear.weight"].T + state.get("_linear.bias", torch.zeros(()))


ACTIVATIONS: list[Any] = [
    pytest.param(torch.relu, torch.relu, id="function"),
    pytest.param("relu", torch.relu, id="relu"),
    pytest.param("sigmoid", torch.sigmoid, id="sigmoid"),
    pytest.param("swish_layernorm", lambda x: x * torch.sigmoid(nn.functional.layer_norm(x, x.shape[-1:])), id="swish"),
    pytest.param(nn.Tanh(), torch.tanh, id="module"),
    pytest.param(nn.Tanh, torch.tanh, id="module class"),
    pytest.param(lambda: nn.LeakyReLU(0.3), lambda x: torch.where(x > 0, x, 0.3 * x), id="factory"),
    pytest.param(lambda x: x**2, lambda x: x**2, id="lambda"),
]


@pytest.mark.parametrize(("activation", "formula"), ACTIVATIONS)
@pytest.mark.parametrize("on_last", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_its_formula(activation: Any, formula: Callable[[Tensor], Tensor], on_last: bool, bias: bool) -> None:
    mlp = MLP(3, [4, 5], bias=bias, activation=activation, activation_on_last=on_last)
    x = torch.randn(7, 3)
    y = by_hand(mlp._mlp[1], formula(by_hand(mlp._mlp[0], x)))
    torch.testing.assert_close(mlp(x), formula(y) if on_last else y)


def test_perceptron_is_its_formula() -> None:
    perceptron = Perceptron(3, 4, activation=torch.sigmoid)
    x = torch.randn(2, 3)
    torch.testing.assert_close(perceptron(x), torch.sigmoid(by_hand(perceptron, x)))
    assert perceptron(torch.randn(2, 5, 3)).shape == (2, 5, 4)


def test_swish_layer_norm_gates_with_the_sigmoid_of_the_norm() -> None:
    swish = SwishLayerNorm(4)
    x = torch.randn(3, 4)
    swish.load_state_dict({"norm.0.weight": torch.tensor([1.0, 2.0, 3.0, 4.0]), "norm.0.bias": torch.zeros(4)})
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(swish(x), x * torch.sigmoid(normed * torch.tensor([1.0, 2.0, 3.0, 4.0])))
    assert set(swish.state_dict()) == {"norm.0.weight", "norm.0.bias"}


def test_state_keys_are_torchrecs() -> None:
    assert list(MLP(3, [4, 5]).state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._linear.bias",
        "_mlp.1._linear.weight",
        "_mlp.1._linear.bias",
    ]
    assert list(MLP(3, [4], bias=False, activation="swish_layernorm").state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._activation_fn.norm.0.weight",
        "_mlp.0._activation_fn.norm.0.bias",
    ]


def test_a_module_is_shared_by_the_layers_and_a_class_is_not() -> None:
    activation = nn.PReLU()
    shared, own = MLP(2, [2, 2], activation=activation), MLP(2, [2, 2], activation=nn.PReLU)
    assert shared._mlp[0]._activation_fn is shared._mlp[1]._activation_fn is activation
    assert own._mlp[0]._activation_fn is not own._mlp[1]._activation_fn


def test_no_layers_is_the_identity() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(MLP(3, [])(x), x)


def test_device_and_dtype_reach_every_layer() -> None:
    mlp = MLP(3, [4, 5], activation="swish_layernorm", device="meta", dtype=torch.float64)
    assert {parameter.device.type for parameter in mlp.parameters()} == {"meta"}
    assert mlp.get_parameter("_mlp.1._linear.weight").dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MLP(3, [4], activation="gelu"),
            "unknown activation 'gelu', expected one of 'relu', 'sigmoid', 'swish",
        ),
        (lambda: MLP(3, [], activation="gelu"), "unknown activation 'gelu'"),
        (lambda: MLP(3, [4, 0]), "out_size must be positive, got 0"),
        (lambda: MLP(0, [4]), "in_size must be positive, got 0"),
        (lambda: MLP(3, [4], activation=lambda: 3), "must return a module, got int"),  # type: ignore[arg-type,return-value]
        (lambda: LowRankCrossNet(4, 2, 0), "Low rank must be larger or equal to 1: low_rank of LowRankCrossNet is 0"),
        (
            lambda: LowRankMixtureCrossNet(4, 2, num_experts=0),
            "num_experts must be larger or equal to 1: num_experts of LowRankMixtureCrossNet is 0",
        ),
        (
            lambda: DLRM_Projection(collection(), DENSE, [DIM], [5, 1], [DIM], [3]),
            r"branch2 layer size \(3\) is not a multiple of .* \(2\): .* interaction_branch2_layer_sizes .* got \[3\]",
        ),
        (lambda: SimpleDeepFMNN(DENSE, collection((2, 3)), 6, 5), "the same dimension, got {'t0': 2, 't1': 3}"),
    ],
)
def test_settings_without_a_meaning_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Scale(nn.Module):
    """Multiplies each column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight


class LazyScale(LazyModuleExtensionMixin, Scale):  # type: ignore[misc]
    """Learns from its first input how many columns there are."""

    cls_to_become = Scale  # type: ignore[assignment]

    def initialize_parameters(self, input: Tensor) -> None:
        if isinstance(self.weight, nn.UninitializedParameter):
            self.weight.materialize((input.shape[1],))
            nn.init.ones_(self.weight)


def three(module: nn.Module) -> None:
    """Sets every scale to 3."""
    if isinstance(module, Scale):
        nn.init.constant_(module.weight, 3.0)


def double(module: nn.Module) -> None:
    """Doubles every scale."""
    if isinstance(module, Scale):
        module.weight.data.mul_(2)


X = torch.ones(2, 4)


@pytest.mark.parametrize("by_name", [False, True])
def test_functions_are_applied_after_the_first_forward_in_order_and_once(by_name: bool) -> None:
    module = LazyScale()
    assert lazy_apply(lazy_apply(module, three), double) is module
    # the first forward is that of the parameters as they began
    assert torch.equal(module(input=X) if by_name else module(X), X)
    assert type(module) is Scale
    for _ in range(2):
        assert torch.equal(module(X), 6 * X)


def test_apply_before_it_raises_and_after_it_works() -> None:
    module = LazyScale()
    with pytest.raises(RuntimeError, match="Module LazyScale has not been initialized. .* run a forward first"):
        module.apply(three)
    module(X)
    assert torch.equal(module.apply(three)(X), 3 * X)


def test_children_are_reached_and_copies_wait_for_their_own_forward() -> None:
    net = lazy_apply(nn.Sequential(LazyScale(), nn.ReLU(), LazyScale()), three)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(X)
        assert torch.equal(other(X), 9 * X)
    net(X)
    assert torch.equal(net(X), 9 * X)
