"""Tables, lookups and training on one device: the first ten minutes with shardwise.

python examples/quickstart.py
"""

from __future__ import annotations

import torch

from shardwise import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    FusedOptimizer,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    fuse_embedding_optimizer,
)


def main() -> None:
    # A batch of three samples with two features, any number of ids each.
    clicked = JaggedTensor(torch.tensor([101, 202, 303]), lengths=torch.tensor([2, 0, 1]))
    user = JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 1, 1]))
    batch = KeyedJaggedTensor.from_jt_dict({"clicked": clicked, "user": user})
    print(batch)

    # One table per feature, rows added or averaged per sample. A table may have its own type and pooling.
    tables = [
        EmbeddingBagConfig(num_embeddings=1000, embedding_dim=8, name="item", feature_names=["clicked"]),
        EmbeddingBagConfig(50, 4, "user", DataType.BF16, ["user"], pooling=PoolingType.MEAN),
    ]
    print("rows of all tables:", sum(rows_of(table) for table in tables))
    ebc = EmbeddingBagCollection(tables)
    pooled: KeyedTensor = ebc(batch)
    print("pooled:", {name: tuple(rows.shape) for name, rows in pooled.to_dict().items()})

    # Unpooled: one row per id, as a sequence model wants them.
    ec = EmbeddingCollection([EmbeddingConfig(1000, 8, "item", feature_names=["clicked"])])
    print("rows of each sample:", [len(rows) for rows in ec(batch)["clicked"].to_dense()])

    # Any torch optimizer trains the parameters through dense gradients ...
    dense = torch.optim.SGD(ebc.parameters(), lr=0.1)
    ebc(batch).values().sum().backward()
    dense.step()

    # ... or the backward itself does, touching only the rows of the batch.
    apply_optimizer_in_backward(RowWiseAdagrad, ec.parameters(), {"lr": 0.1})
    table = ec.get_parameter("embeddings.item.weight")
    before = table[101].detach().clone()
    ec(batch)["clicked"].values().sum().backward()
    print("row 101 moved by", (table[101] - before).abs().max().item())

    # The same as modules that are born with their optimizer, and as a switch for a whole model.
    fused = FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, {"lr": 0.1})
    schedule: FusedOptimizer = fused.fused_optimizer()
    schedule.param_groups[0]["lr"] = 0.05
    schedule.step()
    FusedEmbeddingCollection([EmbeddingConfig(10, 8, "item")], torch.optim.Adam, {"lr": 0.1})
    fuse_embedding_optimizer(torch.nn.Sequential(ebc), torch.optim.SGD, {"lr": 0.1})

    # An id that a table does not have is an ordinary exception that says what and where.
    wrong = KeyedJaggedTensor(["clicked", "user"], torch.tensor([1000, 7]), lengths=torch.tensor([1, 1]))
    try:
        ebc(wrong)
    except IndexError as error:
        print("IndexError:", error)
    # Or it counts as no id, with one warning (WARNING) or none.
    lenient = EmbeddingBagCollection(tables, policy=LookupPolicy(BoundsCheckMode.IGNORE))
    print("ignored:", lenient(wrong)["clicked"].abs().max().item())


def rows_of(table: BaseEmbeddingConfig) -> int:
    return table.num_embeddings


if __name__ == "__main__":
    main()
