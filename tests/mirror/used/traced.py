# type: ignore  # torchrec is served at run time
"""Models are traced and compiled with their batches, packaged, and planned in the words of programs."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.package
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig, ShardPerfContext
from torchrec.distributed.train_pipeline import TrainPipelineContext
from torchrec.distributed.train_pipeline.utils import Tracer
from torchrec.fx.utils import assert_fx_safe, fake_range
from torchrec.inference.model_packager import PredictFactoryPackager
from torchrec.inference.state_dict_transform import state_dict_gather, state_dict_to_device
from torchrec.models.experimental.transformerdlrm import DLRM_Transformer, InteractionTransformerArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor import BaseGroupedFeatureProcessor
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.pt2.checks import is_torchdynamo_compiling
from torchrec.pt2.utils import deregister_fake_classes, kjt_for_pt2_tracing, register_fake_classes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

torch.manual_seed(0)
cpu = torch.device("cpu")
kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 0, 3]), lengths=torch.tensor([2, 0, 1, 1]))
tables = EmbeddingBagCollection(tables=[EmbeddingBagConfig(4, 8, name, feature_names=[name]) for name in "ab"])


# a graph of a model
class Counts(torch.nn.Module):
    def forward(self, features):
        assert_fx_safe(True, "only when it runs")
        return features.lengths()


traced = torch.fx.symbolic_trace(Counts())
assert traced(kjt).tolist() == [2, 0, 1, 1]
assert str(torch.jit.annotations.try_ann_to_type(int, fake_range())) == "int"
graph = Tracer(leaf_modules=["0"]).trace(torch.nn.Sequential(tables))
assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0"]
assert TrainPipelineContext().index is None

# compiled with batches of any number of ids
register_fake_classes()
deregister_fake_classes()
assert not is_torchdynamo_compiling()
compiled = torch.compile(lambda batch: tables(batch).values(), backend="eager", fullgraph=True)
assert torch.equal(compiled(kjt_for_pt2_tracing(kjt)), tables(kjt).values())

# a transformer over the features
inner = InteractionTransformerArch(num_sparse_features=2, embedding_dim=8, nhead=4, ntransformer_layers=1)
assert inner(torch.randn(2, 8), torch.randn(2, 2, 8)).shape[0] == 2
model = DLRM_Transformer(
    embedding_bag_collection=tables, dense_in_features=3, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[4, 1],
    nhead=4, ntransformer_layers=1, dense_device=cpu,
)  # fmt: skip
assert model(torch.randn(2, 3), kjt).shape == (2, 1)

# what a planner is told of a machine
assert POOLING_FACTOR == 1.0 and "key_value" in {kernel.value for kernel in GUARDED_COMPUTE_KERNELS}


class Slow(HardwarePerfConfig):
    """Half as fast as all others."""

    name = "slow"
    device_bw = 1000.0


assert Slow().device_bw == 1000.0 and "hash_size" in ShardPerfContext.__dataclass_fields__


class Doubles(BaseGroupedFeatureProcessor):
    """Every weight twice."""

    def forward(self, features):
        return KeyedJaggedTensor(features.keys(), features.values(), features.weights() * 2, features.lengths())


weighted = KeyedJaggedTensor(["a"], torch.tensor([1]), torch.ones(1), torch.tensor([1]))
assert Doubles()(weighted).weights().tolist() == [2.0]

# histories by user
pool = KeyedJaggedTensorPool(pool_size=4, feature_max_lengths={"a": 2, "b": 2}, device=cpu)
pool.update(torch.tensor([3, 1]), kjt)
assert pool.lookup(torch.tensor([3]))["a"].values().tolist() == [1, 2]

# a state dict on its way to another device, and a factory in a package
state = {"weight": torch.ones(2)}
target = {"weight": torch.zeros(2)}
state_dict_gather(state, target)
assert torch.equal(target["weight"], torch.ones(2))
store = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", store=dist.FileStore(f"{store.name}/store", 1), rank=0, world_size=1)
assert torch.equal(state_dict_to_device(state, dist.group.WORLD, cpu)["weight"], torch.ones(2))
dist.destroy_process_group()


folder = Path(tempfile.mkdtemp())
(folder / "own_factory.py").write_text(
    "class Factory:\n    def create_predict_module(self):\n        return lambda batch: 2 * batch\n"
)
sys.path.insert(0, str(folder))
import own_factory  # noqa: E402


class Packager(PredictFactoryPackager):
    """Nothing beside the factory."""

    @classmethod
    def set_extern_modules(cls, pe):
        pe.extern(["torch.**"])

    @classmethod
    def set_mocked_modules(cls, pe):
        pass


Packager.save_predict_factory(own_factory.Factory, {}, str(folder / "model.pt"), {"note": "text"})
package = torch.package.PackageImporter(str(folder / "model.pt"))
factory = package.import_module("__module_loader").MODULE_FACTORY()
assert factory.create_predict_module()(3) == 6 and package.load_text("extra_files", "note") == "text"
sys.path.remove(str(folder))
