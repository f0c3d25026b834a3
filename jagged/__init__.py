"""Ragged batches: JaggedTensor (bags), KeyedJaggedTensor (bags of ids per feature), KeyedTensor (dense)."""

if __name__ == "jagged":
    raise ImportError("import shardwise.jagged: 'jagged' alone would be a second copy of it")

from ._pytree import flatten_kjt_list, register, unflatten_kjt_list
from .equal import jt_is_equal, kjt_is_equal, validate_keyed_jagged_tensor
from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor
from .keyed_tensor import KeyedTensor, permute_multi_embedding, regroup_kts
from .modules import ComputeJTDictToKJT, ComputeKJTToJTDict, KTRegroupAsDict, maybe_td_to_kjt
from .streamable import Multistreamable, Pipelineable

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Multistreamable",
    "Pipelineable",
    "flatten_kjt_list",
    "jt_is_equal",
    "kjt_is_equal",
    "maybe_td_to_kjt",
    "permute_multi_embedding",
    "regroup_kts",
    "unflatten_kjt_list",
    "validate_keyed_jagged_tensor",
]

register()
