"""Predict modules, which serve requests: `PredictModule` runs a model on a dict of tensors, a factory makes it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from shardwise.jagged import KeyedJaggedTensor

from .folder import Signature
from .quantize import quantize_feature
from .tracing import Call


@dataclass
class QualNameMetadata:
    """About a method that is served: whether its inputs are preprocessed."""

    need_preproc: bool


@dataclass
class BatchingMetadata:
    """About an input: `type` "dense" or "sparse", `device` "cpu" or "cuda", and which tensors to pin.

    `pinned` holds suffixes, "lengths" say; "" is the tensor without one.
    """

    type: str
    device: str
    pinned: list[str]


class PredictModule(nn.Module):
    """A model in eval mode that answers a dict of tensors; a subclass says how, in `predict_forward`.

    Args:
        module: the model.
        device: where tensors that a forward makes go by default, "cpu" or "cuda:1"; by default the current CUDA
            device, or the CPU where there is none.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module = module
        self._device = torch.device(device) if device else None
        self._module.eval()

    @property
    def predict_module(self) -> nn.Module:
        """The model."""
        return self._module

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """The model's result for a batch, whose tensors are of any shape that the model takes."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """`predict_forward` on the device, in inference mode, of tensors of any shape that it takes."""
        if self._device is None:
            self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state dict of the model, by its own names."""
        return self._module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # type: ignore[arg-type]


_CPU = torch.device("cpu")


class PredictFactory(ABC):
    """Makes a model with learned weights that is ready to serve, and describes its inputs to a server."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """The module, its weights in place."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """For each input, how requests are put together to batches."""

    def batching_metadata_json(self) -> str:
        """The same as JSON."""
        return json.dumps({name: asdict(metadata) for name, metadata in self.batching_metadata().items()})

    @abstractmethod
    def result_metadata(self) -> str:
        """The kind of the result, by which a server cuts it up."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """The module, transformed before its weights matter."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """The module, transformed with its weights in place: quantized, say."""

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """For each method that is served, how."""
        return {}

    def qualname_metadata_json(self) -> str:
        """The same as JSON."""
        return json.dumps({name: asdict(metadata) for name, metadata in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """About the inputs, for whoever makes some up. `export_model` looks for a `Signature` under "signature"."""
        return {}


def quantize_dense(
    predict_module: PredictModule,
    dtype: torch.dtype,
    additional_embedding_module_type: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """Make the model's children fp16, in place, but for embedding collections and the types that are listed.

    Each of those children then takes fp32 and fp64 inputs too, and turns them into fp16.

    Raises:
        NotImplementedError: for another dtype than fp16.
    """
    if dtype != torch.half:
        raise NotImplementedError(f"dense layers are made fp16 (torch.half) and nothing else, got {dtype}")
    left = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    for child in predict_module.predict_module.children():
        if not isinstance(child, left) and type(child) not in additional_embedding_module_type:
            child.half()
            child.register_forward_pre_hook(quantize_feature)
    return predict_module


def parts_of(
    factory: PredictFactory, signature: Signature | None, call: Call | None
) -> tuple[nn.Module, Signature | None, Call | None]:
    """The module that a factory makes, its signature, and how it is called, for `export_model`.

    A `PredictModule` gets a dict, whose names `batching_metadata` has: `<name>` of the dense input, and of the sparse
    one `<name>.values`, `<name>.lengths` ([F * B], feature by feature) and, with weights, `<name>.weights`.
    """
    module = factory.create_predict_module()
    module = factory.run_weights_independent_tranformations(module)
    module = factory.run_weights_dependent_transformations(module)
    if signature is None:
        signature = factory.model_inputs_data().get("signature")
    if call is None and isinstance(module, PredictModule):
        call = _DictCall(factory.batching_metadata())
    return module, signature, call


class _DictCall:
    """Calls a PredictModule with the dict that its metadata describes.

    Raises:
        ValueError: there is more than one dense or one sparse input.
    """

    def __init__(self, metadata: Mapping[str, BatchingMetadata]) -> None:
        names = {kind: [name for name, entry in metadata.items() if entry.type == kind] for kind in ("dense", "sparse")}
        others = [name for name in metadata if name not in (*names["dense"], *names["sparse"])]
        if others or len(names["dense"]) > 1 or len(names["sparse"]) != 1:
            raise ValueError(
                f"batching_metadata names dense inputs {names['dense']}, sparse ones {names['sparse']} and others"
                f" {others}: one sparse and at most one dense input can be exported; pass `call` for other modules"
            )
        self._dense, self._sparse = (names["dense"] or [""])[0], names["sparse"][0]

    def __call__(self, model: nn.Module, features: KeyedJaggedTensor, dense: Tensor | None) -> Any:
        batch = {f"{self._sparse}.values": features.values(), f"{self._sparse}.lengths": features.lengths()}
        if features.weights_or_none() is not None:
            batch[f"{self._sparse}.weights"] = features.weights()
        if dense is not None:
            batch[self._dense] = dense
        assert isinstance(model, PredictModule)
        # inference mode is of the eager forward: a trace has no use for it
        return model.predict_forward(batch)
