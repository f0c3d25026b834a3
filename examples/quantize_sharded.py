"""A quantized model over several devices of one process: the same bits, however its tables are cut.

python examples/quantize_sharded.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardingEnv,
    Topology,
)
from shardwise.inference import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    shard_quant_model,
)
from shardwise.kernels import BoundsCheckMode
from shardwise.sharding import column_wise, construct_module_sharding_plan, row_wise
from shardwise.sharding.quant import (
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    sharded_tbes_weights_spec,
)

# with "cuda" rank r is cuda:r; all ranks of "cpu" are the CPU
DEVICES, KIND = 2, "cpu"
BATCH = KeyedJaggedTensor(
    ["clicked", "shop", "tag"], torch.tensor([7, 999, 3, 0, 41, 2]), lengths=torch.tensor([2, 0, 1, 1, 1, 1])
)


class Ranker(nn.Module):
    """Pooled and unpooled tables beneath a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(1000, 64, "item", feature_names=["clicked"]),
                EmbeddingBagConfig(100, 32, "place", feature_names=["shop"]),
            ]
        )
        self.rows = EmbeddingCollection([EmbeddingConfig(50, 16, "tag", feature_names=["tag"])])
        self.top = nn.Linear(112, 1)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """Scores [B, 1]."""
        tags = torch.stack([rows.sum(0) for rows in self.rows(batch)["tag"].to_dense()])
        scores: Tensor = self.top(torch.cat([self.bags(batch).values(), tags], dim=1))
        return scores


def ranker() -> nn.Module:
    """The quantized model."""
    torch.manual_seed(0)
    return quantize_inference_model(Ranker(), per_table_weight_dtype={"place": torch.quint4x2})


def main() -> None:
    """Shard in four ways and compare."""
    model = ranker()
    wanted = model(BATCH)
    weights = get_table_to_weights_from_tbe(model)

    sharded, plan = shard_quant_model(ranker(), DEVICES, KIND, sharding_device="cpu")
    print(plan.plan["bags"])
    print(sharded)
    print("table by table: same bits:", torch.equal(sharded(BATCH), wanted))

    # rows are cut; nothing has memory before the values come
    asked = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in weights}
    sharded, _ = shard_quant_model(ranker(), DEVICES, KIND, constraints=asked)
    assign_weights_to_tbe(sharded, weights)
    print("row by row, filled later: same bits:", torch.equal(sharded(BATCH), wanted))

    # a plan of the planner, for the batches that will come
    sharders = [QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()]
    plan = EmbeddingShardingPlanner(Topology(DEVICES, KIND), batch_size=256).plan(ranker(), sharders)
    sharded, _ = shard_quant_model(ranker(), DEVICES, KIND, "cpu", sharders, sharding_plan=plan)
    print("as the planner says: same bits:", torch.equal(sharded(BATCH), wanted))

    # one collection by hand: bad ids count as none
    bags = ranker().get_submodule("bags")
    lenient = QuantEmbeddingBagCollectionSharder({FUSED_PARAM_BOUNDS_CHECK_MODE: BoundsCheckMode.IGNORE})
    by_hand = construct_module_sharding_plan(
        bags, {"item": row_wise(), "place": column_wise([1, 0])}, lenient, DEVICES, DEVICES, KIND
    )
    alone = lenient.shard(bags, by_hand, ShardingEnv.from_local(DEVICES, 0), "cpu")  # type: ignore[arg-type]
    print("by hand: same bits:", torch.equal(alone(BATCH).values(), bags(BATCH).values()))
    for name, spec in sharded_tbes_weights_spec(alone).items():
        if name.endswith(".weight"):
            print(f"{name}: {spec.shard_sizes} at {spec.shard_offsets} of {spec.fqn}")


if __name__ == "__main__":
    main()
