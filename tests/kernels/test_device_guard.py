"""Every kernel is launched on the device of its tensors, whichever device is current; two GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.tables.id_check import PendingCheck
from shardwise.kernels import new_guard
from shardwise.kernels._op import HAS_TRITON, INTERPRETED, on_own_device
from shardwise.perf.counts import fake_cuda

SCHEMA = "look(Tensor weights, Tensor(a!)[] states, int n, Tensor? scale=None) -> Tensor"
OPS = sorted(name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("shardwise::"))


class OnGpu(Tensor):
    """A tensor that says it lies on a GPU, with its values in host memory."""

    number: int
    # it reaches an op as it is
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return self.number


def on_gpu(index: int) -> Tensor:
    tensor = torch.zeros(1).as_subclass(OnGpu)
    tensor.number = index
    return tensor


class Current:
    """The current device of the process: how often it was asked for, and which others were made current."""

    def __init__(self) -> None:
        self.index, self.asked, self.entered = 0, 0, list[int]()

    def ask(self) -> int:
        self.asked += 1
        return self.index


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    state = Current()

    class Enter:
        def __init__(self, device: Any) -> None:
            self.index = device if isinstance(device, int) else device.index

        def __enter__(self) -> None:
            self.before, state.index = state.index, self.index
            state.entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            state.index = self.before

    monkeypatch.setattr(torch.cuda, "current_device", state.ask)
    monkeypatch.setattr(torch.cuda, "device", Enter)
    return state


@pytest.mark.parametrize(
    ("index", "args"),
    [
        (0, (on_gpu(0), [on_gpu(0)], 3)),
        (1, (on_gpu(1), [on_gpu(1), on_gpu(1)], 3, on_gpu(1))),
        (1, (on_gpu(1), [], 3, None)),
        (2, (torch.zeros(1), [torch.zeros(1), on_gpu(2)], 3)),
        (0, (torch.zeros(1), [], 3)),
    ],
    ids=["is current", "another", "no list", "only in a list", "in host memory"],
)
def test_an_implementation_runs_with_the_device_of_its_tensors_as_the_current_one(
    current: Current, index: int, args: tuple[Any, ...]
) -> None:
    seen: list[tuple[int, tuple[Any, ...]]] = []

    def implementation(*got: Any) -> str:
        seen.append((current.index, got))
        return "result"

    assert on_own_device(SCHEMA, implementation)(*args) == "result"
    assert seen == [(index, args)]
    # where it is current already nothing is entered
    assert current.entered == [index] * (index != 0)
    assert current.asked <= 1 and current.index == 0


def test_the_device_is_current_again_after_an_error(current: Current) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        on_own_device(SCHEMA, fails)(on_gpu(1), [], 3)
    assert current.entered == [1] and current.index == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((on_gpu(0), [], 3, on_gpu(1)), "look: scale is on cuda:1, weights on cuda:0: move one of them"),
        ((on_gpu(1), [on_gpu(1), on_gpu(0)], 3), r"look: states\[1\] is on cuda:0, weights on cuda:1"),
        ((torch.zeros(1), [on_gpu(1), on_gpu(2)], 3), r"look: states\[1\] is on cuda:2, states\[0\] on cuda:1"),
    ],
)
def test_tensors_on_several_devices_are_refused_by_name(current: Current, args: tuple[Any, ...], message: str) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it ran")

    with pytest.raises(ValueError, match=message):
        on_own_device(SCHEMA, never)(*args)


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_guarded(current: Current, name: str) -> None:
    """What CUDA runs looks at all tensors first: of two devices it names both, another one it makes current."""
    op = getattr(torch.ops.shardwise, name).default

    def arguments(devices: Sequence[int]) -> list[Any]:
        each = iter(devices)
        return [_argument(str(argument.type), each) for argument in op._schema.arguments]

    count = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)
    assert count
    if count > 1:
        with pytest.raises(ValueError, match=rf"^{name}: .* is on cuda:1, .* on cuda:0"):
            op._op_dk(torch._C.DispatchKey.CUDA, *arguments([0] * (count - 1) + [1]))
    assert not current.entered
    # the arguments are no op's, so what comes after is its own error or nothing
    with suppress(Exception):
        op._op_dk(torch._C.DispatchKey.CUDA, *arguments([1] * count))
    assert current.entered[:1] == [1] and current.index == 0


def _argument(kind: str, devices: Iterator[int]) -> Any:
    if "Tensor" in kind:
        tensor = on_gpu(next(devices))
        return [tensor] if "List" in kind else tensor
    if kind.startswith("Optional"):
        return None
    return {"str": "sum", "bool": False, "float": 0.0}.get(kind, [] if kind.startswith("List") else 1)


class Launches:
    """What happens on the device that is not there: the current device of every launch."""

    def __init__(self, current: Current) -> None:
        self.current, self.devices = current, list[int]()

    def operation(self, op: Any, args: Any, kwargs: Any, result: Any) -> None: ...

    def allocation(self, memory: Any, op: Any, dtype: torch.dtype) -> None: ...

    def copy(self, where: str, waits: bool) -> None: ...

    def kernel(self, name: str) -> None:
        self.devices.append(self.current.index)


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")
def test_a_collection_on_the_second_gpu_launches_there(monkeypatch: pytest.MonkeyPatch, current: Current) -> None:
    """Its kernels went to the current GPU: addresses of another one, on a stream that nothing orders with its own."""
    monkeypatch.setattr(fake_cuda, "CUDA", torch.device("cuda", 1))
    launches = Launches(current)
    with fake_cuda.use_fake_cuda(launches), patch.object(torch.cuda, "current_device", current.ask):
        tables = [EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["f", "g"])]
        model = EmbeddingBagCollection(tables=tables, device=fake_cuda.CUDA)
        apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
        ids, lengths = torch.arange(12).to(fake_cuda.CUDA), torch.full((6,), 2).to(fake_cuda.CUDA)
        batch = KeyedJaggedTensor(keys=["f", "g"], values=ids, lengths=lengths)
        model(batch).values().sum().backward()
    assert len(launches.devices) >= 6 and set(launches.devices) == {1}
    assert current.index == 0


def test_what_a_check_found_is_waited_for_on_the_stream_that_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event was recorded on the current device, and the guard read before its copy had come."""
    streams: list[object] = []
    guard = new_guard()

    class Recorded:
        def record(self, stream: object) -> None:
            streams.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    empty = torch.empty
    # ends with the test's body: what poisons `torch.empty` is undone before a monkeypatch is
    with patch.object(torch, "empty", lambda *args, pin_memory, **kwargs: empty(*args, **kwargs)):
        PendingCheck(guard).send(torch.zeros(1), torch.zeros(2))
    assert streams == [("stream of", guard.device)]
