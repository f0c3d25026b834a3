"""TorchRec's small test models and their random batches: its numbers, sharded and not."""

from __future__ import annotations

import copy
import json
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkout import run_python
from ranks import run_ranks
from torch import nn

from shardwise import DistributedModelParallel
from shardwise.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from shardwise.jagged import KeyedJaggedTensor
from shardwise.sharding.testing.model_input import ModelInput, power_law_ids
from shardwise.sharding.testing.one_way_sharders import (
    TestEBCSharder,
    TestEBCSharderMCH,
    TestEBSharder,
    TestECSharder,
    TestETCSharder,
    TestETSharder,
    TestFusedEBCSharder,
    TestFusedECSharder,
    create_test_sharder,
)
from shardwise.sharding.testing.sparse_model import (
    TestEBCSparseArch,
    TestNegSamplingModule,
    TestOverArchRegroupModule,
    TestPositionWeightedPreprocModule,
    TestSparseNN,
    TestTowerCollectionSparseNN,
    TestTowerSparseNN,
)
from shardwise.sharding.testing.state import copy_state_dict

TABLES = [
    EmbeddingBagConfig(
        num_embeddings=n * 10, embedding_dim=n * 4, name=f"table_{n - 1}", feature_names=[f"feature_{n - 1}"]
    )
    for n in range(1, 5)
]
WEIGHTED = [
    EmbeddingBagConfig(
        num_embeddings=20, embedding_dim=4, name="weighted_table_0", feature_names=["weighted_feature_0"]
    )
]
INT32 = torch.int32
# arguments of `generate`, and the checksum of TorchRec's batches of these
BATCHES: dict[int, tuple[list[Any], dict[str, Any]]] = {
    3580242058: ([3, 2, 5, TABLES, WEIGHTED], {"random_seed": 1}),
    3191006596: (
        [3, 2, 5, TABLES, WEIGHTED],
        {
            "random_seed": 2, "tables_pooling": [1, 2, 3, 20], "weighted_tables_pooling": [4],
            "max_feature_lengths": [0, 1, 5, 18],
        },
    ),
    4251155422: (
        [3, 2, 5, TABLES, WEIGHTED],
        {
            "random_seed": 3, "variable_batch_size": True, "pooling_avg": 2, "lengths_dtype": INT32,
            "indices_dtype": INT32,
        },
    ),
    2885517262: ([3, 2, 5, TABLES, []], {"random_seed": 4, "use_offsets": True, "offsets_dtype": INT32}),
    933996193: ([2, 1, 2, TABLES[:1], WEIGHTED], {"random_seed": 5, "randomize_indices": False}),
    3958508456: ([2, 1, 2, TABLES[:2], WEIGHTED], {"random_seed": 6, "power_law_alpha": 0.0}),
    642703361: ([2, 1, 2, TABLES[:2], WEIGHTED], {"random_seed": 6, "power_law_alpha": 0.5}),
    3341984490: ([2, 1, 2, TABLES[:2], WEIGHTED], {"random_seed": 6, "power_law_alpha": 1.0}),
    3126088277: ([2, 1, 2, TABLES[:2], WEIGHTED], {"random_seed": 6, "power_law_alpha": 1.5}),
}  # fmt: skip
# of each model TorchRec's loss, predictions, and sum of the gradients' absolute values
MODELS: dict[str, tuple[float, list[float], float]] = {
    "nn": (0.5635206699, [1.5475378036, 1.4378395081, 1.4671514034], 0.9793416560),
    "regroup": (0.5524145365, [1.6016471386, 1.3503327370, 1.4681487083], 0.7621228817),
    "tower": (0.5968280435, [0.5047943592, 0.5046636462, 0.5032775998], 1.0388431406),
    "towers": (0.6002957225, [0.4799879193, 0.5191100836, 0.4990948141], 0.7424384712),
}


def summed(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return [list(tensor.shape), str(tensor.dtype)[6:], zlib.crc32(tensor.detach().contiguous().numpy().tobytes())]


def features(kjt: KeyedJaggedTensor | None) -> Any:
    if kjt is None:
        return None
    inverse = kjt.inverse_indices_or_none()
    tensors = [kjt.values(), kjt.lengths(), kjt.offsets(), kjt.weights_or_none(), inverse and inverse[1]]
    return [kjt.keys(), *map(summed, tensors), kjt.stride_per_key()]


def checksum(batches: tuple[ModelInput, list[ModelInput]]) -> int:
    def shown(batch: ModelInput) -> Any:
        return [
            summed(batch.float_features), features(batch.idlist_features), features(batch.idscore_features),
            summed(batch.label),
        ]  # fmt: skip

    whole, parts = batches
    return zlib.crc32(json.dumps([shown(whole), list(map(shown, parts))]).encode())


def fill(model: nn.Module) -> None:
    """Weights that follow from their names."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            phase = zlib.crc32(name.encode()) % 100
            weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.37 + phase).view_as(weight) * 0.3)


def made(name: str) -> nn.Module:
    sizes = {"dense_arch_hidden_sizes": [6], "dense_arch_out_size": 5, "over_arch_out_size": 3}
    model: nn.Module = {
        "nn": lambda: TestSparseNN(TABLES, weighted_tables=WEIGHTED),
        "regroup": lambda: TestSparseNN(
            TABLES, weighted_tables=WEIGHTED, over_arch_clazz=TestOverArchRegroupModule, submodule_kwargs=sizes
        ),
        "tower": lambda: TestTowerSparseNN(TABLES, weighted_tables=WEIGHTED),
        "towers": lambda: TestTowerCollectionSparseNN(TABLES, weighted_tables=WEIGHTED),
    }[name]()
    fill(model)
    return model


@pytest.mark.parametrize("expected", BATCHES)
def test_batches_of_a_seed_are_torchrecs(expected: int) -> None:
    arguments, more = BATCHES[expected]
    assert checksum(ModelInput.generate(*arguments, **more)) == expected


def test_batches_of_features_with_their_own_sizes_are_torchrecs() -> None:
    generate = ModelInput.generate_variable_batch_input
    assert checksum(generate(3, 2, 5, TABLES[:2], WEIGHTED)) == 3808344766
    whole = generate(3, 2, 5, TABLES[:2], WEIGHTED, global_constant_batch=True, random_seed=7)
    assert checksum(whole) == 2491618493
    by_offsets, _ = generate(3, 2, 5, TABLES[:2], use_offsets=True, random_seed=7)
    by_lengths, _ = generate(3, 2, 5, TABLES[:2], random_seed=7)
    assert features(by_offsets.idlist_features) == features(by_lengths.idlist_features)


def test_each_ranks_part_is_its_samples_of_the_whole() -> None:
    whole, parts = ModelInput.generate(3, 2, 5, TABLES, WEIGHTED, random_seed=1)
    for rank, part in enumerate(parts):
        for own, every in (
            (part.idlist_features, whole.idlist_features),
            (part.idscore_features, whole.idscore_features),
        ):
            assert own is not None and every is not None
            for key in own.keys():  # noqa: SIM118
                bags = every[key].to_dense()[3 * rank : 3 * rank + 3]
                assert [bag.tolist() for bag in own[key].to_dense()] == [bag.tolist() for bag in bags]
        assert part.label.equal(whole.label[3 * rank : 3 * rank + 3])
    copied = whole.to(torch.device("cpu"))
    assert checksum((copied, parts)) == 3580242058
    small, _ = ModelInput.generate(1, 1, 3, TABLES[:1], WEIGHTED, random_seed=1, pooling_avg=2)
    assert small.idscore_features is not None
    ids, scored = len(small.idlist_features.values()), len(small.idscore_features.values())
    # three floats, a label, two lengths, ids and weights
    assert small.size_in_bytes() == 3 * 4 + 4 + 2 * 8 + ids * 8 + scored * (8 + 4)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="input_type must be 'kjt', got 'td'"):
        ModelInput.generate(2, 1, 2, TABLES, [], input_type="td")
    with pytest.raises(ValueError, match=r"must have the same length. Got 1 and 4\."):
        ModelInput.generate(2, 1, 2, TABLES, [], tables_pooling=[3])
    with pytest.raises(ValueError, match="alpha must be >= 0, got -1"):
        power_law_ids(-1.0, 2, 3, torch.int64, None)
    with pytest.raises(ValueError, match="zch_kwargs is not served"):
        TestSparseNN(TABLES, zch_kwargs={})
    with pytest.raises(ValueError, match="tables must be EmbeddingBagConfigs"):
        TestSparseNN([EmbeddingConfig(num_embeddings=2, embedding_dim=4, name="t", feature_names=["f"])])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tables must be 4 at least, got 3"):
        TestTowerSparseNN(TABLES[:3], weighted_tables=WEIGHTED)
    with pytest.raises(ValueError, match="Sharder not supported table: must be one of embedding_bag, "):
        create_test_sharder("table", "row_wise", "fused")


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_torchrecs_losses_and_gradients(name: str) -> None:
    loss, prediction, gradients = MODELS[name]
    batch, _ = ModelInput.generate(3, 1, 10, TABLES, WEIGHTED, random_seed=8, pooling_avg=3)
    model = made(name)
    ours = model(batch)
    assert ours[0].item() == pytest.approx(loss, rel=1e-5) and ours[1].tolist() == pytest.approx(prediction, rel=1e-5)
    ours[0].backward()
    total = sum(weight.grad.abs().sum().item() for weight in model.parameters() if weight.grad is not None)
    assert total == pytest.approx(gradients, rel=1e-4)
    assert model.eval()(batch).tolist() == pytest.approx(prediction, rel=1e-5)


def test_names_in_the_state_dict_are_torchrecs() -> None:
    layers = [f"over.dhn_arch.linear{n}.{kind}" for n in (0, 1) for kind in ("bias", "weight")]
    tables = [f"sparse.ebc.embedding_bags.table_{n}.weight" for n in range(4)]
    assert sorted(made("nn").state_dict()) == [
        "dense.dummy_buffer", "dense.dummy_param", "dense.linear.bias", "dense.linear.weight", "dummy_ones", *layers,
        *tables, "sparse.weighted_ebc.embedding_bags.weighted_table_0.weight",
    ]  # fmt: skip
    model = made("nn")
    assert isinstance(model, TestSparseNN)
    copied = model.copy(torch.device("cpu"))
    assert copied is not model and copied.state_dict().keys() == model.state_dict().keys()


def test_tables_with_position_weights_are_looked_up_apart() -> None:
    table = EmbeddingBagConfig(num_embeddings=4, embedding_dim=2, name="feature_9", feature_names=["feature_9"])
    arch = TestEBCSparseArch([TABLES[0], table], [], max_feature_lengths={"feature_9": 3})
    weights = dict(arch.named_parameters())
    with torch.no_grad():
        weights["fp_ebc._feature_processors.position_weights.feature_9"].copy_(torch.tensor([1.0, 10.0, 100.0]))
        table_weight = weights["fp_ebc._embedding_bag_collection.embedding_bags.feature_9.weight"]
        table_weight.copy_(torch.arange(8.0).view(4, 2))
    batch = KeyedJaggedTensor(["feature_0", "feature_9"], torch.tensor([1, 3, 0]), lengths=torch.tensor([1, 2]))
    out = arch(batch, batch_size=3)
    # row 3 once and row 0 ten times; samples beyond the features are zeros
    assert out["feature_9"].tolist() == [[6, 17], [0, 0], [0, 0]] and out.keys() == ["feature_0", "feature_9"]


def test_preprocessing_changes_a_copy_of_the_batch() -> None:
    batch, _ = ModelInput.generate(2, 1, 3, TABLES[:1], WEIGHTED, random_seed=1, pooling_avg=2)
    before = checksum((batch, []))
    extra, _ = ModelInput.generate(2, 1, 3, TABLES[1:2], [], random_seed=2)
    more = TestNegSamplingModule(extra, has_params=True)(batch)
    assert more.idlist_features.keys() == ["feature_0", "feature_1"] and more.label.shape == (4,)
    weighed = TestPositionWeightedPreprocModule({"feature_0": 9}, torch.device("cpu"))(batch)
    assert weighed.idlist_features.weights().tolist() == [1.0] * len(batch.idlist_features.values())
    assert checksum((batch, [])) == before


def test_sharders_offer_one_way() -> None:
    for sharder in (
        TestEBCSharder("row_wise", "fused"), TestECSharder("row_wise", "fused", {"learning_rate": 0.2}),
        TestEBSharder("row_wise", "fused", {}), TestETSharder("row_wise", "fused", {}),
        TestETCSharder("row_wise", "fused", {}),
    ):  # fmt: skip
        assert sharder.sharding_types("cpu") == ["row_wise"] and sharder.compute_kernels("x", "cpu") == ["fused"]
    for any_kernel in (TestFusedEBCSharder("column_wise"), TestFusedECSharder("column_wise")):
        assert any_kernel.sharding_types("cuda") == ["column_wise"]
    mapped = TestEBCSharderMCH("row_wise", "fused")
    assert mapped.sharding_types("cpu") == ["row_wise"]
    made_sharder = create_test_sharder("embedding_collection", "table_wise", "dense")
    assert isinstance(made_sharder, TestECSharder) and made_sharder.module_type is EmbeddingCollection
    assert made_sharder.fused_params == {"learning_rate": 0.1}
    assert create_test_sharder("embedding_bag_collection", "table_wise", "fused").module_type is EmbeddingBagCollection


def train_one_step() -> list[list[list[float]]]:
    """A program's test, of two sharding types: what a rank predicts before and after a step, and what the whole model
    does for its samples."""
    return [_train_one_step(sharding_type) for sharding_type in ("table_wise", "row_wise")]


def _train_one_step(sharding_type: str) -> list[list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, parts = ModelInput.generate(3, world, 10, TABLES, WEIGHTED, random_seed=8, pooling_avg=3)
    model = made("nn")
    sharder: Any = create_test_sharder("embedding_bag_collection", sharding_type, "fused", {"learning_rate": 0.5})
    sharded = DistributedModelParallel(copy.deepcopy(model), device=torch.device("cpu"), sharders=[sharder])
    # other weights first, so that copying has something to do
    for weight in model.parameters():
        weight.data.neg_()
    copy_state_dict(sharded.state_dict(), model.state_dict(), exclude_predfix="none of them")
    alone = model.eval()(whole)[3 * rank : 3 * rank + 3]
    before = sharded.eval()(parts[rank])
    loss, _ = sharded.train()(parts[rank])
    loss.backward()
    return [alone.tolist(), before.tolist(), sharded.eval()(parts[rank]).tolist()]


def test_a_sharded_model_predicts_as_the_whole_one_whose_weights_it_took() -> None:
    for rank in run_ranks(2, train_one_step):
        for alone, before, after in rank:
            assert before == pytest.approx(alone, rel=1e-5) and after != before


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(KeyError, match="'b' is not among the names to copy from"):
        copy_state_dict({"a.b": torch.ones(1), "b": torch.ones(1)}, {}, ["a."])
    with pytest.raises(ValueError, match="'a' has 1 dims of torch.float32 here, but the tensor to copy 2 of torch.f"):
        copy_state_dict({"a": torch.ones(1)}, {"a": torch.ones(1, 1)})


PROGRAM = """
import unittest
import torch
import torch.distributed as dist
from torchrec.distributed.test_utils.multi_process import MultiProcessContext, MultiProcessTestBase
from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN
from torchrec.test_utils import skip_if_asan


def sum_ranks(rank, world_size, backend):
    with MultiProcessContext(rank, world_size, backend) as ctx:
        total = torch.tensor(rank)
        dist.all_reduce(total, group=ctx.pg)
        assert total.item() == 3, f"the sum is {total.item()}"


class Test(MultiProcessTestBase):
    @skip_if_asan
    def test_sum(self):
        self._run_multi_process_test(callable=sum_ranks, world_size=2, backend="gloo")


if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.long
def test_a_programs_own_test_runs_and_says_what_failed_where(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python("-m", "shardwise.torchrec", tmp_path / "program.py", status=1)
    assert "FAILED (failures=1)" in done.stderr and "another exception" not in done.stderr
    assert "Worker raised AssertionError: the sum is 1" in done.stderr and "in sum_ranks" in done.stderr


def test_torchrecs_modules_have_them() -> None:
    test_model, sharders, test_sharding = (
        import_module(f"shardwise.torchrec.distributed.test_utils.{name}")
        for name in ("test_model", "emb_sharder", "test_sharding")
    )
    assert test_model.TestSparseNN is TestSparseNN and test_model.ModelInput is ModelInput
    assert sharders.TestEBCSharder is test_model.TestEBCSharder is TestEBCSharder
    assert test_sharding.copy_state_dict is copy_state_dict and test_sharding.SharderType.EMBEDDING_BAG.value
