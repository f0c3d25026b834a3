# type: ignore  # torchrec is served at run time
"""A trained model is quantized, pruned, cut into pieces and asked, and its rows go over to another."""

import torch
import torchrec.inference
from torchrec.distributed.fused_params import (
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.quant_embedding import (
    QuantEmbeddingCollection,
    QuantEmbeddingCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingBagCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.inference.modules import (
    DEFAULT_FUSED_PARAMS,
    DEFAULT_QUANT_MAPPING,
    DEFAULT_QUANTIZATION_DTYPE,
    DEFAULT_SHARDERS,
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    set_pruning_data,
    shard_quant_model,
    trim_torch_package_prefix_from_typename,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantBags,
    EmbeddingCollection as QuantRows,
    QuantManagedCollisionEmbeddingCollection,
    quant_prep_enable_quant_state_dict_split_scale_bias,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
    quant_prep_enable_register_tbes,
)
from torchrec.quant.utils import meta_to_cpu_placement
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

torch.manual_seed(0)
config = EmbeddingBagConfig(6, 8, "user", feature_names=["user"])
row_config = EmbeddingConfig(6, 8, "item", feature_names=["item"])
slots = MCHManagedCollisionModule(4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
mapped_config = EmbeddingConfig(4, 8, "wide", feature_names=["wide"])


class Model(torch.nn.Module):
    """A collection of each kind."""

    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=[config])
        self.rows = EmbeddingCollection(tables=[row_config])

    def forward(self, features):
        return self.bags(features)["user"], self.rows(features)["item"].values()


features = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 5, 3]), lengths=torch.tensor([2, 0, 1, 1]))
model = Model()
expected = model(features)

assert torchrec.inference.modules.quantize_inference_model is quantize_inference_model
assert DEFAULT_QUANTIZATION_DTYPE is torch.int8
name = trim_torch_package_prefix_from_typename("<torch_package_0>.torchrec.modules.embedding_modules.X")
assert name == "torchrec.modules.embedding_modules.X"
assert any(key.endswith("EmbeddingBagCollection") for key in DEFAULT_QUANT_MAPPING)
assert DEFAULT_FUSED_PARAMS[FUSED_PARAM_REGISTER_TBE_BOOL] is True
names = {
    FUSED_PARAM_BOUNDS_CHECK_MODE, FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP, FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
}  # fmt: skip
assert len(names) == 3 and names & set(DEFAULT_FUSED_PARAMS)

# what is asked of a float model before it is quantized
quant_prep_enable_register_tbes(model, [EmbeddingBagCollection])
quant_prep_enable_quant_state_dict_split_scale_bias(model)
quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [EmbeddingBagCollection])
quantized = quantize_inference_model(model)
assert isinstance(quantized.bags, QuantBags) and QuantEmbeddingBagCollection is QuantBags
assert isinstance(quantized.rows, QuantRows) and QuantEmbeddingCollection is QuantRows
for near, far in zip(quantized(features), expected, strict=True):
    assert torch.allclose(near, far, atol=0.01) and not torch.equal(near, far)

# rows of one model in another
other = quantize_inference_model(Model())
assert not torch.equal(other(features)[0], quantized(features)[0])
assign_weights_to_tbe(other, get_table_to_weights_from_tbe(quantized))
assert torch.equal(other(features)[0], quantized(features)[0])

# in pieces on devices of this process
sharders = [QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()]
assert {type(sharder) for sharder in sharders} <= {type(sharder) for sharder in DEFAULT_SHARDERS}
sharded, plan = shard_quant_model(
    quantized, world_size=2, compute_device="cpu", sharding_device="cpu", sharders=sharders
)
assert set(plan.plan) == {"bags", "rows"}
for mine, whole in zip(sharded(features), quantized(features), strict=True):
    assert torch.equal(torch.as_tensor(mine), whole)
processed = QuantFeatureProcessedEmbeddingBagCollectionSharder()
assert processed.module_type.__name__.endswith("FeatureProcessedEmbeddingBagCollection")
parameters = plan.plan["bags"]
assert all("cpu" in str(shard.placement) for spec in parameters.values() for shard in spec.sharding_spec.shards)
empty = QuantBags([config], is_weighted=False, device=torch.device("meta"))
meta_to_cpu_placement(empty)
assert empty(features)["user"].eq(0).all()

# a table of which some rows were pruned away
pruned = Model()
set_pruning_data(pruned, {"user": 3})
pruned = quantize_inference_model(pruned)
assert pruned.bags.embedding_bag_configs()[0].num_embeddings_post_pruning == 3

# rows behind a map of ids
maps = ManagedCollisionCollection({"wide": slots}, [mapped_config])
wide = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=[mapped_config]), maps)
ids = KeyedJaggedTensor(["wide"], torch.tensor([1 << 40, 7]), lengths=torch.tensor([1, 1]))
wide(ids)
served = quantize_inference_model(torch.nn.Sequential(wide))
assert isinstance(served[0], QuantManagedCollisionEmbeddingCollection)
assert torch.allclose(served(ids)[0]["wide"].values(), wide.eval()(ids)[0]["wide"].values(), atol=0.01)
assert QuantManagedCollisionEmbeddingCollectionSharder().module_type is QuantManagedCollisionEmbeddingCollection
