"""What TorchRec 1.8 refuses is refused by its type of error, in a message that begins with its words.

Types and words were read off TorchRec 1.8.0 by running the same attempts there. Ours may be of another type as well
(TorchRec asserts where Python would have a ValueError), and says more after those words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, tensor

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    ParameterSharding,
    ShardingEnv,
)
from shardwise.embeddings import (
    CombinedOptimizer,
    FeatureProcessedEmbeddingBagCollection,
    FusedEmbeddingBagCollection,
    KeyedOptimizer,
    PoolingType,
    PositionWeightedModule,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupStage,
)
from shardwise.embeddings.config import dtype_to_data_type
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.embeddings.optim.fbgemm_types import data_type_to_sparse_type, pooling_type_to_str
from shardwise.jagged import JaggedTensor, KTRegroupAsDict
from shardwise.models import (
    DLRM,
    DLRM_DCN,
    DLRM_Projection,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    OverArch,
    SimpleDeepFMNN,
)

KJT, EBC, EC = KeyedJaggedTensor, EmbeddingBagCollection, EmbeddingCollection
IDS, LENGTHS = torch.arange(6), tensor([2, 0, 1, 3])


def batch(keys: str = "ab", **given: Any) -> KeyedJaggedTensor:
    return KJT(list(keys), IDS, **{"lengths": LENGTHS, **given})


def bag(name: str = "t", dim: int = 4, feature: str = "a") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(10, dim, name, feature_names=[feature])


def rows(name: str = "t", dim: int = 4, feature: str = "a") -> EmbeddingConfig:
    return EmbeddingConfig(10, dim, name, feature_names=[feature])


def two(dim: int = 4) -> EmbeddingBagCollection:
    return EBC([bag(), bag("u", dim, "b")])


def id_map(slots: int = 10, interval: int = 2, **given: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(slots, "cpu", LFU_EvictionPolicy(), interval, **given)


def optimizer() -> KeyedOptimizer:
    param = nn.Parameter(torch.ones(3))
    return KeyedOptimizer({"x": param}, {param: {"momentum": torch.zeros(3)}}, [{"params": [param], "lr": 0.1}])


def indexed() -> KeyedJaggedTensor:
    return batch(inverse_indices=(["a", "b"], torch.zeros(2, 2, dtype=torch.int64)))


def table(**sizes: list[int]) -> nn.Module:
    return DLRM_Projection(two(), 3, [8, 4], [5, 1], sizes.get("first", [8]), sizes.get("second", [8]))


OUTSIDE = KJT(["a"], IDS + 100, lengths=tensor([3, 3]))
OTHER = KJT(["c"], IDS, lengths=tensor([3, 3]))
KT: Callable[[], KeyedTensor] = lambda: KeyedTensor(["a"], [2], torch.ones(2, 2))  # noqa: E731
ASSERTED: dict[str, Callable[[], object]] = {
    "This (Keyed)JaggedTensor doesn't have weights.": lambda: batch().weights(),
    "This (Keyed)JaggedTensor doesn't have weights": lambda: JaggedTensor(IDS, lengths=tensor([6])).weights(),
    "This (Keyed)JaggedTensor doesn't have": lambda: EBC([bag()], is_weighted=True)(batch()),
    "This KJT doesn't have inverse indices": lambda: batch().inverse_indices(),
    "Must provide lengths or offsets": lambda: JaggedTensor(IDS),
    "Must provide lengths or": lambda: KJT(["a"], IDS).lengths(),
    "lengths must be of integer type, but got torch.float32": lambda: batch(lengths=LENGTHS.float()),
    "lengths must be of integer type, but got torch.bool": lambda: JaggedTensor(IDS[:1], lengths=tensor([True])),
    "offsets must be of integer type, but got torch.float32": lambda: batch(lengths=None, offsets=torch.rand(5)),
    "strides must be consistent for all KJTs": lambda: KJT.concat([batch(), batch("c")]),
    "inverse indices must be consistent for all KJTs": lambda: KJT.concat([indexed(), OTHER]),
    "inverse indices must be consistent for all": lambda: KJT.concat([OTHER, indexed()]),
    "": lambda: KJT.dist_init(["a"], [IDS], False, 1, None, [2]),
    " ": lambda: KJT.dist_init(["a"], [LENGTHS, IDS], False, 1, None, None),
    "Groups and keys should have same length": lambda: KeyedTensor.regroup_as_dict([KT()], [["a"]], ["x", "y"]),
    "Groups and keys should have same": lambda: KTRegroupAsDict([["a"]], ["x", "y"]),
    "Low rank must be larger or equal to 1": lambda: LowRankCrossNet(4, 1, 0),
    "Low rank must be larger or equal to": lambda: LowRankMixtureCrossNet(4, 1, 2, 0),
    "num_experts must be larger or equal to 1": lambda: LowRankMixtureCrossNet(4, 1, 0),
    "At least one embedding bag is required": lambda: DLRM(EBC([]), 3, [4], [5, 1]),
    "At least one embedding bag is": lambda: SimpleDeepFMNN(3, EBC([]), 4, 5),
    "All EmbeddingBagConfigs must have the same dimension": lambda: DLRM(two(8), 3, [4], [5, 1]),
    "All EmbeddingBagConfigs must have the same": lambda: SimpleDeepFMNN(3, two(8), 4, 5),
    "zch_size must be > 0": lambda: id_map(0),
    "eviction_interval must be > 1": lambda: id_map(10, 0),
    "ManagedCollisionModule limited to 1024 shards": lambda: id_map(2000, output_segments=list(range(1100))),
    "max_output_id in managed collision module for t must match 10": lambda: ManagedCollisionCollection(
        {"t": id_map(5)}, [bag()]
    ),
    "Embedding Bag Collection and Managed Collision Collection must contain the Embedding Configs": lambda: (
        ManagedCollisionEmbeddingBagCollection(EBC([bag("u")]), ManagedCollisionCollection({"t": id_map()}, [bag()]))
    ),
    "Embedding Collection and Managed Collision Collection must contain the Embedding Configs": lambda: (
        ManagedCollisionEmbeddingCollection(EC([rows("u")]), ManagedCollisionCollection({"t": id_map()}, [rows()]))
    ),
    "Passed in feature processors do not match feature names of embedding bag": lambda: (
        FeatureProcessedEmbeddingBagCollection(EBC([bag()], True), {"z": PositionWeightedModule(3)})
    ),
    "EmbeddingBagCollection must accept weighted inputs for feature processor": lambda: (
        FeatureProcessedEmbeddingBagCollection(EBC([bag()]), {"a": PositionWeightedModule(3)})
    ),
    "Max iter of the stage": lambda: WarmupOptimizer(optimizer(), [WarmupStage(max_iters=5), WarmupStage(max_iters=3)]),
    "Process group is not initialized": lambda: DistributedModelParallel(nn.Linear(2, 2)),
}
VALUES: dict[str, Callable[[], object]] = {
    "Can't concat empty KJT list": lambda: KJT.concat([]),
    "Can't merge weighted KJT with unweighted KJT": lambda: KJT.concat(
        [batch(), KJT(["c"], IDS, torch.ones(6), tensor([3, 3]))]
    ),
    "Duplicate table name t": lambda: EBC([bag(), bag()]),
    "Duplicate table name": lambda: EC([rows(), rows()]),
    "All tables in a EmbeddingCollection are required to have same embedding dimension. Violating case: u's"
    " embedding_dim 8 != 4": lambda: EC([rows(), rows("u", 8, "b")]),
    "Cannot fuse optimizer_type=<class 'torch.optim.rprop.Rprop'> with kwargs {'lr': 0.1}": lambda: (
        FusedEmbeddingBagCollection([bag()], torch.optim.Rprop, {"lr": 0.1})
    ),
    "Invalid data type torch.complex64": lambda: dtype_to_data_type(torch.complex64),
    "Invalid DataType x": lambda: data_type_to_sparse_type("x"),  # type: ignore[arg-type]
    "Unsupported pooling type PoolingType.NONE": lambda: pooling_type_to_str(PoolingType.NONE),
    "embedding_bag_collection dimension (4) and final dense arch layer size": lambda: DLRM(two(), 3, [8, 5], [5, 1]),
    "OverArch must have multiple layers.": lambda: OverArch(3, [1]),
    "OverArch must have multiple": lambda: DLRM(two(), 3, [8, 4], [1]),
    "Final interaction branch1 layer size (7) is not a multiple of embedding size (4)": lambda: table(first=[7]),
    "Final interaction branch2 layer size (7) is not a multiple of embedding size (4)": lambda: table(second=[7]),
    "Table t is not present in managed_collision_modules": lambda: ManagedCollisionCollection({"z": id_map()}, [bag()]),
    "All state keys must be params. The following keys are not: ": lambda: KeyedOptimizer(
        {"x": nn.Parameter(torch.ones(1))}, {nn.Parameter(torch.ones(1)): {}}, []
    ),
    "Different parameter count: 1 vs 0": lambda: optimizer().load_state_dict({"state": {}}),
    "Parameter x not found": lambda: optimizer().load_state_dict({"state": {"z": {}}}),
    "Different state size: 1 vs 0": lambda: optimizer().load_state_dict({"state": {"x": {}}}),
    "Parameter a.x not found": lambda: CombinedOptimizer([("a", optimizer())]).load_state_dict({"state": {"x": {}}}),
    "Different parameter count: 1 vs 2": lambda: CombinedOptimizer([("a", optimizer())]).load_state_dict(
        {"state": {"x": {}, "y": {}}}
    ),
    "Sharding type not supported zz": lambda: ParameterSharding("zz", "dense", [0]),
    "Compute kernel not supported zz": lambda: ParameterSharding("data_parallel", "zz", [0]),
    "Duplicate param key x": lambda: CombinedOptimizer([("", optimizer()), ("", optimizer())]),
    "Invalid learning rate: -1": lambda: RowWiseAdagrad([nn.Parameter(torch.ones(1))], lr=-1),
    "Invalid lr_decay value: -1": lambda: RowWiseAdagrad([nn.Parameter(torch.ones(1))], lr_decay=-1),
    "Invalid weight_decay value: -1": lambda: RowWiseAdagrad([nn.Parameter(torch.ones(1))], weight_decay=-1),
    "Invalid initial_accumulator_value value: -1": lambda: RowWiseAdagrad(
        [nn.Parameter(torch.ones(1))], initial_accumulator_value=-1
    ),
    "Invalid epsilon value: -1": lambda: RowWiseAdagrad([nn.Parameter(torch.ones(1))], eps=-1),
}
# TorchRec's message is the key alone
KEYS: dict[str, Callable[[], object]] = {
    "z": lambda: batch()["z"],
    "y": lambda: KT()["y"],
    "x": lambda: KeyedTensor.regroup([KT()], [["x"]]),
    "b": lambda: two()(KJT(["a"], IDS, lengths=tensor([3, 3]))),
    "t_seen": lambda: EC([rows(feature="t_seen")])(batch()),
}
OTHERS: list[tuple[type[Exception], Callable[[], object]]] = [
    (IndexError, lambda: batch().permute([2])),
    # an id outside of its table: TorchRec's sequences raise the one, its bags and sharded lookups the other
    (IndexError, lambda: EC([rows()])(OUTSIDE)),
    (RuntimeError, lambda: EC([rows()])(OUTSIDE)),
    (IndexError, lambda: EBC([bag()])(OUTSIDE)),
    (RuntimeError, lambda: EBC([bag()])(OUTSIDE)),
    (KeyError, lambda: optimizer().load_state_dict({})),
    (KeyError, lambda: CombinedOptimizer([("a", optimizer())]).load_state_dict({})),
    (NotImplementedError, lambda: optimizer().step()),
    (NotImplementedError, lambda: CombinedOptimizer([("a", optimizer())]).step()),
    (NotImplementedError, lambda: optimizer().init_state()),
    (NotImplementedError, lambda: CombinedOptimizer([]).add_param_group({"params": [nn.Parameter(torch.ones(1))]})),
    (TypeError, lambda: CombinedOptimizer([3])),  # type: ignore[list-item]
    (AttributeError, lambda: DistributedModelParallel(3, ShardingEnv.from_local(1, 0))),  # type: ignore[arg-type]
    (NotImplementedError, lambda: optimizer().add_param_group({"params": [nn.Parameter(torch.ones(1))]})),
]


def raised(attempt: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as error:  # noqa: PT011
        attempt()
    return error.value


@pytest.mark.parametrize("words", ASSERTED)
def test_what_torchrec_asserts_is_an_assertion_error_and_python_s_own(words: str) -> None:
    assert not dist.is_initialized()
    error = raised(ASSERTED[words])
    assert isinstance(error, AssertionError)
    assert isinstance(error, (ValueError, TypeError, RuntimeError))
    assert str(error).startswith(words.strip())


@pytest.mark.parametrize("words", VALUES)
def test_value_errors_begin_with_torchrec_s_words(words: str) -> None:
    error = raised(VALUES[words])
    assert isinstance(error, ValueError)
    assert str(error).startswith(words)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_error_has_the_key(key: str) -> None:
    error = raised(KEYS[key])
    assert isinstance(error, KeyError)
    assert repr(key) in error.args[0]


@pytest.mark.parametrize(("kind", "attempt"), OTHERS)
def test_other_errors_are_of_torchrec_s_type(kind: type[Exception], attempt: Callable[[], object]) -> None:
    assert isinstance(raised(attempt), kind)


@pytest.mark.parametrize(("model", "sizes"), [(DLRM, ()), (DLRM_DCN, (2, 2)), (DLRM_Projection, ([8], [8]))])
def test_a_model_of_tables_of_several_dims_is_refused_by_every_class(model: Any, sizes: Any) -> None:
    assert isinstance(raised(lambda: model(two(8), 3, [4], [5, 1], *sizes)), AssertionError)
