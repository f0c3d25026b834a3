"""Functions that TorchRec's programs call around collections, by its names: the values that TorchRec 1.8 gives."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.embeddings import EmbeddingBagConfig, embedding_names_by_table
from shardwise.embeddings.collections.position_weights import (
    BaseFeatureProcessor,
    BaseGroupedFeatureProcessor,
    PositionWeightedModule,
    PositionWeightedProcessor,
)
from shardwise.embeddings.torchrec.dense_modules import (
    check_module_output_dimension,
    construct_modulelist_from_single_module,
    convert_list_of_modules_to_modulelist,
    extract_module_or_tensor_callable,
    get_module_output_dimension,
    init_mlp_weights_xavier_uniform,
)
from shardwise.embeddings.torchrec.jagged_outputs import (
    SequenceVBEContext,
    construct_jagged_tensors,
    construct_jagged_tensors_inference,
    jagged_index_select_with_empty,
    reset_module_states_post_sharding,
)
from shardwise.embeddings.torchrec.pooled_outputs import process_pooled_embeddings, reorder_inverse_indices
from shardwise.fbgemm.regroup_module import PermuteMultiEmbedding
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, KTRegroupAsDict
from shardwise.sharding.plan.plan import ShardingType

EMBEDDINGS = torch.arange(12.0).view(6, 2)


def shown(jagged: dict[str, JaggedTensor]) -> dict[str, Any]:
    """Of each name the first column of its embeddings, the lengths and the weights."""
    return {
        name: [jt.values()[:, 0].tolist(), jt.lengths().tolist(), None if jt.weights_or_none() is None else
               jt.weights().tolist()] for name, jt in jagged.items()
    }  # fmt: skip


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g", "h"], torch.arange(1, 7), lengths=torch.tensor([1, 2, 0, 1, 2, 0]))


def test_names_tell_tables_of_a_shared_feature_apart() -> None:
    tables = [
        EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name=name, feature_names=list(keys))
        for name, keys in (("t1", "ab"), ("t2", "bc"))
    ]
    assert embedding_names_by_table(tables) == [["a", "b@t1"], ["b@t2", "c"]]
    theirs = import_module("shardwise.torchrec.modules.embedding_modules")
    assert theirs.get_embedding_names_by_table is embedding_names_by_table


def test_pooled_rows_are_those_of_the_full_batch_and_so_are_their_gradients() -> None:
    inverse = (["a", "b"], torch.tensor([[0, 1, 1], [1, 0, 1]]))
    assert reorder_inverse_indices(inverse, ["b@t1", "a", "b@t2"]).tolist() == [[1, 0, 1], [0, 1, 1], [1, 0, 1]]
    assert reorder_inverse_indices(None, ["a"]).shape == (0,)
    with pytest.raises(KeyError, match=r"features \['c'\] have no inverse indices: those are of \['a', 'b'\]"):
        reorder_inverse_indices(inverse, ["a", "c@t"])
    rows = [torch.arange(4.0).view(2, 2).requires_grad_(), (10 + torch.arange(6.0).view(2, 3)).requires_grad_()]
    full = process_pooled_embeddings(rows, inverse[1])
    assert full.tolist() == [[0, 1, 13, 14, 15], [2, 3, 10, 11, 12], [2, 3, 13, 14, 15]]
    (full * torch.arange(15.0).view(3, 5)).sum().backward()
    gradients = [row.grad.tolist() for row in rows if row.grad is not None]
    assert gradients == [[[0, 1], [15, 17]], [[7, 8, 9], [14, 16, 18]]]
    plain = process_pooled_embeddings(rows, torch.empty(0))
    assert plain.tolist() == [[0, 1, 10, 11, 12], [2, 3, 13, 14, 15]]


def test_sequences_become_a_jagged_tensor_of_each_name() -> None:
    names = ["f", "g", "h"]
    assert shown(construct_jagged_tensors(EMBEDDINGS, features(), names, need_indices=True)) == {
        "f": [[0, 2, 4], [1, 2], [1, 2, 3]], "g": [[6], [0, 1], [4]], "h": [[8, 10], [2, 0], [5, 6]]
    }  # fmt: skip
    # pieces of a table cut by columns, in the order that is asked for
    cut = KeyedJaggedTensor(["f", "g", "f2"], torch.arange(6), lengths=torch.tensor([1, 1, 0, 2, 1, 1]))
    pieces = construct_jagged_tensors(EMBEDDINGS, cut, ["f", "g", "f"], features_to_permute_indices={"f": [1, 0]})
    assert pieces["f"].values().tolist() == [[8, 9, 0, 1], [10, 11, 2, 3]]
    assert shown(pieces)["g"] == [[4, 6], [0, 2], None]
    with pytest.raises(ValueError, match="embedding_names must have one for each of 3 features, got 2"):
        construct_jagged_tensors(EMBEDDINGS, cut, ["f", "g"])
    with pytest.raises(ValueError, match="embeddings have 5 rows, but the features 6 ids"):
        construct_jagged_tensors(EMBEDDINGS[1:], cut, ["f", "g", "f"])


@pytest.mark.parametrize("use_gather_select", [False, True])
def test_embeddings_of_unique_ids_are_expanded_and_gradients_added(use_gather_select: bool) -> None:
    unique = EMBEDDINGS[:3].clone().requires_grad_()
    ids = KeyedJaggedTensor(["u", "v", "w"], torch.arange(3), lengths=torch.tensor([1, 1, 1]))
    jagged = construct_jagged_tensors(
        unique, ids, ["f", "g", "h"], original_features=features(), use_gather_select=use_gather_select,
        reverse_indices=torch.tensor([0, 1, 1, 2, 0, 1]),
    )  # fmt: skip
    assert shown(jagged) == {
        "f": [[0, 2, 2], [1, 2], None], "g": [[4], [0, 1], None], "h": [[0, 2], [2, 0], None]
    }  # fmt: skip
    total = torch.stack([jt.values().sum() * (n + 1) for n, jt in enumerate(jagged.values())]).sum()
    total.backward()
    assert unique.grad is not None and unique.grad.tolist() == [[4, 4], [5, 5], [2, 2]]


def test_bags_of_batch_sizes_of_their_own_are_put_in_the_order_of_the_context() -> None:
    context = SequenceVBEContext(
        recat=torch.tensor([2, 0, 1, 1], dtype=torch.int32),
        unpadded_lengths=torch.tensor([2, 1, 3], dtype=torch.int32),
        reindexed_lengths=torch.tensor([[3, 2], [1, 1]], dtype=torch.int32), reindexed_length_per_key=[5, 2],
        reindexed_values=torch.arange(7),
    )  # fmt: skip
    jagged = construct_jagged_tensors(EMBEDDINGS, features(), ["f", "g"], need_indices=True, seq_vbe_ctx=context)
    assert shown(jagged) == {"f": [[6, 8, 10, 0, 2], [3, 2], [0, 1, 2, 3, 4]], "g": [[4, 4], [1, 1], [5, 6]]}
    # without one, each feature has its own number of bags
    own = KeyedJaggedTensor(
        ["f", "g"], torch.arange(6), lengths=torch.tensor([2, 1, 3]), stride_per_key_per_rank=[[1], [2]]
    )
    assert shown(construct_jagged_tensors(EMBEDDINGS, own, ["f", "g"])) == {
        "f": [[0, 2], [2], None], "g": [[4, 6, 8, 10], [1, 3], None]
    }  # fmt: skip


def test_lengths_alone_make_jagged_tensors_where_a_model_serves() -> None:
    lengths, ids = torch.tensor([[1, 2], [0, 1]]), torch.tensor([7, 8, 9, 5])
    padded = construct_jagged_tensors_inference(
        EMBEDDINGS, lengths, ids, ["f", "g"], need_indices=True, remove_padding=True
    )
    assert shown(padded) == {"f": [[0, 2, 4], [1, 2], [7, 8, 9]], "g": [[6], [0, 1], [5]]}
    unique = construct_jagged_tensors_inference(
        EMBEDDINGS, lengths, ids, ["f", "g"], reverse_indices=torch.tensor([5, 0, 0, 1])
    )
    assert shown(unique) == {"f": [[10, 0, 0], [1, 2], None], "g": [[2], [0, 1], None]}


def test_bags_and_last_writes_are_selected() -> None:
    values, ends = torch.arange(6) * 3, torch.tensor([2, 3, 6])
    selected = jagged_index_select_with_empty(values, torch.tensor([2, 0, 2]), ends, torch.tensor([3, 5, 8]))
    assert selected.tolist() == [[9], [12], [15], [0], [3], [9], [12], [15]]
    nothing = torch.empty(0, dtype=torch.int64)
    assert jagged_index_select_with_empty(values, nothing, ends, nothing).shape == (0,)


def test_dense_modules_are_made_of_what_is_given() -> None:
    layer = nn.Linear(3, 5)
    # as upstream, a module is no function without arguments: its forward needs one
    assert extract_module_or_tensor_callable(layer) is layer
    assert extract_module_or_tensor_callable(lambda: layer) is layer

    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    assert extract_module_or_tensor_callable(double) is double
    with pytest.raises(ValueError, match="takes no input to return a torch.nn.Module, but got: <class 'int'>"):
        extract_module_or_tensor_callable(lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="unsupported operand"):
        extract_module_or_tensor_callable(lambda: 3 + "3")  # type: ignore[operator]
    assert get_module_output_dimension(layer, 3) == 5 and get_module_output_dimension(double, 3) == 3
    nested = construct_modulelist_from_single_module(nn.Sequential(layer, nn.ReLU()), (2, 3))
    assert check_module_output_dimension(nested, 3, 5) and not check_module_output_dimension([layer], 3, 4)
    linears = [each for each in nested.modules() if isinstance(each, nn.Linear)]
    assert len(linears) == 6 and len({each.weight.sum().item() for each in (layer, *linears)}) == 7
    bound = (6 / (3 + 5)) ** 0.5
    assert all(each.weight.abs().max() <= bound and not each.bias.any() for each in linears)
    init_mlp_weights_xavier_uniform(nn.Linear(2, 2, bias=False))
    lists = convert_list_of_modules_to_modulelist([[nn.ReLU()], [nn.Tanh()]], (2, 1))
    assert isinstance(lists, nn.ModuleList) and isinstance(lists[1], nn.ModuleList)
    with pytest.raises(AssertionError, match=r"the counts of modules \(1\) do not match with the required counts \(2,"):
        convert_list_of_modules_to_modulelist([nn.ReLU()], (2,))


def test_a_module_that_permutes_columns_has_the_ops_values_and_gradients() -> None:
    module = PermuteMultiEmbedding([["a", "c"], ["b"]])
    values = [torch.arange(6.0).view(2, 3).requires_grad_(), (10 + torch.arange(4.0).view(2, 2)).requires_grad_()]
    assert module(values) is values
    arguments = torch.ops.fbgemm.kt_regroup_arguments(
        values[0], [["a", "b"], ["c"]], [[1, 2], [2]], [["a", "c"], ["b"]]
    )
    module.init_tensors(*arguments)
    assert not module.state_dict()
    first, second = module(values)
    assert first.tolist() == [[0, 10, 11], [3, 12, 13]] and second.tolist() == [[1, 2], [4, 5]]
    ((first * torch.arange(6).view(2, 3)).sum() + (second * torch.arange(4).view(2, 2)).sum()).backward()
    gradients = [each.grad.tolist() for each in values if each.grad is not None]
    assert gradients == [[[0, 0, 1], [3, 2, 3]], [[1, 2], [4, 5]]]
    moved = PermuteMultiEmbedding([["a", "c"], ["b"]], multi_device=True)
    moved.init_tensors(*arguments)
    moved.set_device("meta")
    assert moved._permutes.is_meta
    graph = torch.fx.symbolic_trace(module)
    assert [each.tolist() for each in graph(values)] == [first.tolist(), second.tolist()]


def test_regrouping_casts_by_its_method_and_forgets_on_request() -> None:
    class Halved(KTRegroupAsDict):
        def embedding_cast(self, embs: list[Tensor]) -> list[Tensor]:
            return [emb / 2 for emb in super().embedding_cast(embs)]

    given = [KeyedTensor(["a"], [2], torch.ones(1, 2))]
    plain = KTRegroupAsDict([["a"]], ["x"], emb_dtype=torch.float16)
    assert [each.dtype for each in plain.embedding_cast([torch.ones(1, dtype=torch.float64)])] == [torch.float16]
    assert plain(given)["x"].dtype == torch.float16
    out = Halved([["a"]], ["x"], emb_dtype=torch.bfloat16)(given)["x"]
    assert out.dtype == torch.bfloat16 and out.tolist() == [[0.5, 0.5]]
    model = nn.Sequential(plain)
    assert plain._plan is not None
    reset_module_states_post_sharding(model)
    assert plain._plan is None and plain(given)["x"].tolist() == [[1, 1]]


def test_older_position_weights_derive_from_bases_that_programs_derive_from() -> None:
    class Doubled(BaseGroupedFeatureProcessor):
        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(features.keys(), features.values() * 2, lengths=features.lengths())

    assert Doubled()(features()).values().tolist() == [2, 4, 6, 8, 10, 12]
    assert issubclass(PositionWeightedModule, BaseFeatureProcessor)
    assert issubclass(PositionWeightedProcessor, BaseGroupedFeatureProcessor)
    processor = PositionWeightedProcessor({"f": 2})
    assert isinstance(processor, BaseGroupedFeatureProcessor) and list(processor.state_dict()) == ["position_weights.f"]
    bases: list[Any] = [BaseFeatureProcessor, BaseGroupedFeatureProcessor]
    for base in bases:
        with pytest.raises(TypeError, match="abstract"):
            base()


def test_config_modules_have_the_sharding_types() -> None:
    configs = import_module("shardwise.torchrec.modules.embedding_configs")
    assert configs.ShardingType is ShardingType and configs.ShardingType("row_wise").value == "row_wise"
