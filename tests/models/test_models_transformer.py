"""DLRM with a transformer, and DLRM with its dense layers compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_zoo import bag_tables, fused
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    KeyedJaggedTensor,
    ShardingEnv,
    ShardingPlan,
)
from shardwise.models import DLRM, DLRM_DCN, DLRM_Transformer, InteractionTransformerArch
from shardwise.models.cuda_graphs import build_dlrm, collect_outputs, generate_batch
from shardwise.sharding import construct_module_sharding_plan, row_wise, table_wise

ROWS = {"f0": 5, "f1": 5}


def transformer() -> DLRM_Transformer:
    """Without dropout, with weights that any library can be given."""
    tables = EmbeddingBagCollection(bag_tables(ROWS, 4))
    model = DLRM_Transformer(tables, 3, [5, 4], [6, 1], nhead=2, ntransformer_layers=2).eval()
    with torch.no_grad():
        for n, (_, parameter) in enumerate(sorted(model.named_parameters())):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (0.7 + n)) * 0.5
            parameter.copy_(wave.view(parameter.shape))
    return model


def features(rank: int = 0) -> KeyedJaggedTensor:
    ids = torch.tensor([0, 4, 2, 1, 3, 3, 2])
    return KeyedJaggedTensor(["f0", "f1"], (ids + rank) % 5, lengths=torch.tensor([2, 0, 1, 1, 2, 1]))


DENSE = torch.tensor([[0.1, -0.2, 0.3], [1.0, 0.5, -1.5], [-0.7, 0.0, 0.9]])
WEIGHTS = torch.tensor([[1.0], [-2.0], [0.5]])

# of TorchRec 1.8.0 on a CPU, and gradients of a part of the parameters times cos(0), cos(1), ..., summed
LOGITS = [0.7956050038337708, 0.7872748374938965, 0.7967186570167542]
GRADIENTS = {
    "sparse_arch.embedding_bag_collection.embedding_bags.tf0.weight": 0.002147760538475812,
    "sparse_arch.embedding_bag_collection.embedding_bags.tf1.weight": 0.062047265198838755,
    "dense_arch.model._mlp.1._linear.weight": -0.03815001842466222,
    "inter_arch.interarch_TE.layers.0.self_attn.in_proj_weight": 0.0002672192079379031,
    "inter_arch.interarch_TE.layers.0.self_attn.in_proj_bias": -6.550740526321473e-05,
    "inter_arch.interarch_TE.layers.0.self_attn.out_proj.weight": -0.17529416727685662,
    "inter_arch.interarch_TE.layers.0.self_attn.out_proj.bias": 0.02950739971354474,
    "inter_arch.interarch_TE.layers.1.linear1.weight": -0.37302859268289656,
    "inter_arch.interarch_TE.layers.1.linear1.bias": 0.18143855345792237,
    "inter_arch.interarch_TE.layers.1.norm1.weight": -0.27956439599812527,
    "inter_arch.interarch_TE.layers.1.norm1.bias": -0.22899725250638214,
    "over_arch.model.1.weight": -0.002404198439171043,
}


def test_the_transformers_logits_and_gradients_are_torchrecs() -> None:
    model = transformer()
    logits = model(DENSE, features())
    assert logits.flatten().tolist() == pytest.approx(LOGITS, rel=1e-6)
    (logits * WEIGHTS).sum().backward()
    parameters = dict(model.named_parameters())
    gradients = {}
    for name in GRADIENTS:
        gradient = parameters[name].grad
        assert gradient is not None
        wave = torch.cos(torch.arange(gradient.numel(), dtype=torch.float64)).view(gradient.shape)
        gradients[name] = float((gradient.double() * wave).sum())
    assert gradients == pytest.approx(GRADIENTS, rel=1e-4, abs=1e-7)


def encoded(arch: InteractionTransformerArch, vectors: Tensor) -> Tensor:
    """Attention is all you need, section 3, layer by layer: [S, N, D] -> [S, N, D], over S by each of `nhead` heads."""
    layers: Any = arch.interarch_TE.layers
    for layer in layers:
        attention = layer.self_attn
        dim = vectors.shape[2] // arch.nhead
        projected = vectors @ attention.in_proj_weight.T + attention.in_proj_bias
        heads = []
        for head in range(arch.nhead):
            columns = slice(head * dim, (head + 1) * dim)
            query, key, value = (part[:, :, columns] for part in projected.chunk(3, dim=2))
            scores = torch.einsum("snd,tnd->nst", query, key) / dim**0.5
            heads.append(torch.einsum("nst,tnd->snd", scores.softmax(dim=2), value))
        attended = torch.cat(heads, dim=2) @ attention.out_proj.weight.T + attention.out_proj.bias
        vectors = F.layer_norm(vectors + attended, vectors.shape[2:], layer.norm1.weight, layer.norm1.bias)
        hidden = torch.relu(vectors @ layer.linear1.weight.T + layer.linear1.bias)
        added = vectors + hidden @ layer.linear2.weight.T + layer.linear2.bias
        vectors = F.layer_norm(added, vectors.shape[2:], layer.norm2.weight, layer.norm2.bias)
    return vectors


def test_the_interaction_is_an_encoder_over_the_batch() -> None:
    torch.manual_seed(0)
    arch = InteractionTransformerArch(num_sparse_features=2, embedding_dim=6, nhead=3, ntransformer_layers=2).eval()
    dense, sparse = torch.randn(4, 6, requires_grad=True), torch.randn(4, 2, 6, requires_grad=True)
    output = arch(dense, sparse)
    expected = encoded(arch, torch.cat([dense[:, None], sparse], dim=1)).reshape(4, 18)
    torch.testing.assert_close(output, expected)
    inputs, weights = (dense, sparse), torch.randn_like(output)
    for own, reference in zip(
        torch.autograd.grad((output * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(own, reference)
    assert torch.equal(InteractionTransformerArch(0, 8)(dense, sparse), dense)
    with pytest.raises(ValueError, match="embedding_dim must be a multiple of nhead, got 6 and 4"):
        InteractionTransformerArch(2, 6, nhead=4)


@contextmanager
def compiled_by(backend: Callable[..., Any]) -> Iterator[list[str]]:
    """`torch.compile` by a backend that needs no C++ compiler; gives the modes that were asked for."""
    compile_of_torch, modes = torch.compile, []

    def compile_by(model: Any, *, mode: str) -> Any:
        modes.append(mode)
        return compile_of_torch(model, backend=backend)

    with patch("torch.compile", compile_by):
        yield modes


class Graphs:
    """A backend that runs what it is given, and keeps it."""

    def __init__(self) -> None:
        self.kept: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.kept.append(graph)
        return graph.forward


@pytest.mark.parametrize("kind", [DLRM, DLRM_DCN, DLRM_Transformer], ids=lambda kind: kind.__name__)
def test_compiled_dense_layers_give_the_same_logits_and_gradients(kind: type[DLRM]) -> None:
    torch.manual_seed(0)
    more: dict[str, Any] = {
        DLRM: {}, DLRM_DCN: {"dcn_num_layers": 2, "dcn_low_rank_dim": 3}, DLRM_Transformer: {"nhead": 2},
    }[kind]  # fmt: skip
    eager = kind(EmbeddingBagCollection(bag_tables(ROWS, 4)), 3, [5, 4], [6, 1], **more).eval()
    model, graphs = copy.deepcopy(eager), Graphs()
    with compiled_by(graphs) as modes:
        model.compile_dense_path()
        model.compile_dense_path("max-autotune")
        assert modes == ["reduce-overhead"] * 3
        logits = model(DENSE, features())
        model(DENSE, features(1))
        # one graph for each of the three, none of them a lookup
        assert len(graphs.kept) == 3
        # a copy is not compiled, and may be
        copied = copy.deepcopy(model)
        copied.compile_dense_path(compile_mode="default")
        assert modes[3:] == ["default"] * 3
    expected = eager(DENSE, features())
    torch.testing.assert_close(logits, expected)
    for output in (logits, expected):
        (output * WEIGHTS).sum().backward()
    assert list(model.state_dict()) == list(eager.state_dict())
    own = dict(model.named_parameters())
    with compiled_by(graphs):
        sharded = DistributedModelParallel(fused(model), ShardingEnv.from_local(1, 0), init_data_parallel=False)
        torch.testing.assert_close(sharded(DENSE, features()), expected)
        # the layers were not compiled again
        assert len(graphs.kept) == 3
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad)


@pytest.mark.long
def test_torchs_own_compiler_gives_the_same_logits() -> None:
    """Half a minute of C++; there are no CUDA graphs on a CPU, and the mode that asks for them compiles without."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    sizes: dict[str, Any] = {"num_sparse_features": 2, "num_embeddings": 10, "dense_in_features": 3}
    model = build_dlrm(device, embedding_dim=8, over_arch_layer_sizes=(4, 1), **sizes)
    batches = [generate_batch(device, batch_size=4, pooling_factor=2, **sizes) for _ in range(2)]
    expected = collect_outputs(model, batches)
    model.compile_dense_path()
    for own, reference in zip(collect_outputs(model, batches), expected, strict=True):
        torch.testing.assert_close(own, reference)


class OneBuffer(nn.Module):
    """How often it was called, always in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)

    def forward(self, features: Tensor) -> Tensor:
        return self.calls.add_(1)


def test_outputs_of_a_measurement_are_those_of_the_model_and_stay() -> None:
    torch.manual_seed(0)
    device = torch.device("cpu")
    sizes: dict[str, Any] = {"num_sparse_features": 3, "num_embeddings": 10, "dense_in_features": 5}
    model = build_dlrm(device, embedding_dim=8, **sizes)
    batches = [generate_batch(device, batch_size=4, pooling_factor=2, **sizes) for _ in range(2)]
    dense, sparse = batches[0]
    assert dense.shape == (4, 5) and sparse.keys() == ["f0", "f1", "f2"]
    assert sparse.lengths().tolist() == [2] * 12 and 0 <= int(sparse.values().min()) <= int(sparse.values().max()) < 10
    assert not torch.equal(dense, batches[1][0]) and not model.training
    for own, (dense, sparse) in zip(collect_outputs(model, batches), batches, strict=True):
        assert torch.equal(own, model(dense, sparse)) and not own.requires_grad
    # a graph that writes into one buffer does not change what was collected
    model.over_arch = OneBuffer()  # type: ignore[assignment]
    first, second = collect_outputs(model, batches)
    assert (float(first), float(second)) == (1.0, 2.0)


def trained_in_dmp() -> None:
    """Two steps of a sharded transformer, beside the same model in one process."""
    rank = dist.get_rank()
    alone, model = fused(transformer()), fused(transformer())
    tables = model.sparse_arch.embedding_bag_collection
    plan = construct_module_sharding_plan(tables, {"tf0": row_wise(), "tf1": table_wise(1)}, world_size=2)
    sharded = DistributedModelParallel(model, plan=ShardingPlan({"sparse_arch.embedding_bag_collection": plan}))
    dense, by_hand = (
        torch.optim.SGD([p for name, p in each.named_parameters() if "embedding_bags" not in name], 0.1)
        for each in (sharded, alone)
    )
    for _ in range(2):
        dense.zero_grad()
        (sharded(DENSE, features(rank)) * WEIGHTS).sum().backward()
        dense.step()
        by_hand.zero_grad()
        # of the mean of both ranks' losses
        losses = [(alone(DENSE, features(r)) * WEIGHTS).sum() / 2 for r in range(2)]
        (losses[0] + losses[1]).backward()
        by_hand.step()
    logits = alone(DENSE, features(rank))
    torch.testing.assert_close(sharded(DENSE, features(rank)), logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, transformer()(DENSE, features(rank)), rtol=1e-2)


@pytest.mark.ranks
def test_a_transformer_trains_sharded_as_alone() -> None:
    run_ranks(2, trained_in_dmp)
