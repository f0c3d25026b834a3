"""Programs around FBGEMM's ops: compiled, exported, saved and loaded elsewhere, and wrong calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkout import run_python
from torch import Tensor, nn

import shardwise.fbgemm
from shardwise.fbgemm import OPS, Op, load_ops

ops = torch.ops.fbgemm


class History(nn.Module):
    """Attention over histories of items, as sequence models write it."""

    def __init__(self, most: int = 4, dim: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.most = most
        self.project = nn.Linear(dim, dim)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = ops.asynchronous_complete_cumsum(lengths)
        padded = ops.jagged_to_padded_dense(self.project(values), [offsets], [self.most], 0.0)
        mixed = torch.softmax(padded @ padded.transpose(1, 2), -1) @ padded
        jagged, _ = ops.dense_to_jagged(mixed, [offsets], values.shape[0])
        added, _ = ops.jagged_dense_elementwise_add_jagged_output(jagged, [offsets], padded)
        return added


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (6,), generator=generator)
    return torch.randn(int(lengths.sum()), 3, generator=generator), lengths


def plain(model: History, values: Tensor, lengths: Tensor) -> Tensor:
    """The same in plain torch."""
    rows = model.project(values)
    bags = torch.split(rows, lengths.tolist())
    short = [model.most - len(bag) for bag in bags]
    padded = torch.stack([nn.functional.pad(bag, (0, 0, 0, rows)) for bag, rows in zip(bags, short, strict=True)])
    mixed = torch.softmax(padded @ padded.transpose(1, 2), -1) @ padded
    return torch.cat([(mixed + padded)[b, : len(bag)] for b, bag in enumerate(bags)])


def gradients(function: object, model: History, values: Tensor, lengths: Tensor) -> list[Tensor]:
    values = values.clone().requires_grad_()
    output = function(values, lengths)  # type: ignore[operator]
    weights = torch.arange(output.numel(), dtype=torch.float32).view_as(output).sin()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [values, *model.parameters()])]


@pytest.mark.parametrize("backend", ["", "eager", "aot_eager"])
def test_a_model_is_what_plain_torch_makes_of_it(backend: str) -> None:
    """Outputs and gradients, eager and compiled with sizes that change."""
    model = History()
    function = torch.compile(model, backend=backend, dynamic=True, fullgraph=True) if backend else model
    for seed in range(3):
        values, lengths = batch(seed)
        expected = gradients(lambda v, n: plain(model, v, n), model, values, lengths)
        for ours, wanted in zip(gradients(function, model, values, lengths), expected, strict=True):
            torch.testing.assert_close(ours, wanted)
    torch._dynamo.reset()


def test_an_exported_program_names_the_ops_and_runs_where_they_are_loaded(tmp_path: Path) -> None:
    model, (values, lengths) = History(), batch()
    size = torch.export.Dim("size", min=2)
    exported = torch.export.export(model, (values, lengths), dynamic_shapes={"values": {0: size}, "lengths": None})
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {
        "fbgemm.asynchronous_complete_cumsum.default",
        "fbgemm.jagged_to_padded_dense.default",
        "fbgemm.dense_to_jagged.default",
        "fbgemm.jagged_dense_elementwise_add_jagged_output.default",
    } <= names
    torch.export.save(exported, tmp_path / "model.pt2")
    other = batch(3)
    torch.save((other, model(*other).detach()), tmp_path / "batch.pt")
    program = """
import torch
import shardwise.fbgemm
exported = torch.export.load("model.pt2")
args, expected = torch.load("batch.pt")
torch.testing.assert_close(exported.module()(*args).detach(), expected)
"""
    run_python("-c", program, folder=tmp_path)


def test_a_script_of_torchscript_is_saved_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import torch
import shardwise.fbgemm

def padded(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [2], 0.0)

torch.jit.script(padded).save("padded.pt")
loaded = torch.jit.load("padded.pt")
print(loaded(torch.ones(3, 1), torch.tensor([1, 2])).flatten().tolist())
""")
    assert run_python("program.py", folder=tmp_path).stdout.split("\n")[0] == "[1.0, 0.0, 1.0, 1.0]"


def test_the_table_has_an_entry_a_name() -> None:
    each = OPS["segment_sum_csr"]
    assert isinstance(each, Op) and each.name == "segment_sum_csr"
    assert each.schema == "segment_sum_csr(SymInt batch_size, Tensor csr_seg, Tensor values) -> Tensor"
    assert each.differentiable and not OPS["offsets_range"].differentiable
    # all are registered, so nothing is left to do
    assert load_ops() == [] and set(shardwise.fbgemm.registered_ops()) == set(OPS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.asynchronous_complete_cumsum(torch.tensor(3)), "t_in must have 1 or 2 dimensions"),
        (lambda: ops.offsets_range(torch.tensor([0, 9]), 5), "offsets"),
        (lambda: ops.segment_sum_csr(0, torch.tensor([0, 1]), torch.ones(1)), "batch_size must be positive"),
        (lambda: ops.jagged_to_padded_dense(torch.ones(3, 1), [torch.tensor([0, 9])], [2], 0.0), "offsets"),
    ],
)
def test_a_wrong_call_is_said_in_words(call: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()  # type: ignore[operator]
