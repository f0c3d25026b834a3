# type: ignore  # torchrec is served at run time
"""Models are traced and compiled with their batches, and packaged and planned in the words of programs."""

import tempfile
from pathlib import Path

import torch
from torchrec.distributed.planner.constants import GUARDED_COMPUTE_KERNELS, POOLING_FACTOR
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
