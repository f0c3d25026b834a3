"""`torch.ops.fbgemm.X` under TorchRec's names: our hint where nobody registered the op, the op where somebody did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from checkout import SHARED

from shardwise.migration.hints import OPS, advice, op_hint
from shardwise.migration.mirror import hint_at_ops, leave_ops_alone
from shardwise.migration.names import finding

# FBGEMM's ops for users, where a checkout has the list beside it
REFERENCE = SHARED / "reference" / "fbgemm_ops.md"


@pytest.fixture
def hinting() -> Iterator[None]:
    hint_at_ops()
    yield
    leave_ops_alone()


@pytest.mark.parametrize(
    ("op", "ours"),
    [
        ("permute_2D_sparse_data", "shardwise.kernels.permute_2d"),
        ("permute_2D_sparse_data_input1D", "shardwise.kernels.permute_2d"),
        ("asynchronous_complete_cumsum", "shardwise.kernels.complete_cumsum"),
        ("split_embedding_codegen_lookup_sgd_function", "EmbeddingBagCollection with apply_optimizer_in_backward"),
        ("FloatToFused8BitRowwiseQuantized", "quantize_rows and dequantize_rows"),
        ("mystery", "nothing of ours does the same; ops of ours are functions of shardwise.kernels"),
    ],
)
def test_an_op_that_nobody_registered_says_what_to_use(hinting: None, op: str, ours: str) -> None:
    """Torch said "'_OpNamespace' 'fbgemm' object has no attribute ..." in a program without FBGEMM.

    That is where two of three user programs with FBGEMM's ops stopped, with nothing to go on.
    """
    with pytest.raises(AttributeError, match=f"^torch.ops.fbgemm.{op} is not served; .*{re.escape(ours)}"):
        getattr(torch.ops.fbgemm, op)
    assert not hasattr(torch.ops.fbgemm, op)
    found = finding(f"torch.ops.fbgemm.{op}.default")
    assert found.status == "missing" and ours in found.hint


def test_an_op_that_is_registered_wins(hinting: None) -> None:
    library = torch.library.Library("fbgemm", "DEF")
    library.define("jagged_softmax(Tensor values) -> Tensor")
    library.impl("jagged_softmax", lambda values: values * 2, "CompositeImplicitAutograd")
    two = torch.tensor([2.0])
    assert torch.ops.fbgemm.jagged_softmax(two).item() == 4
    assert torch.ops.fbgemm.jagged_softmax.default(two).item() == 4
    assert torch.ops.fbgemm.jagged_softmax.__module__ == torch.ops.aten.add.__module__.replace("aten", "fbgemm")

    def traced(values: torch.Tensor) -> torch.Tensor:
        return torch.ops.fbgemm.jagged_softmax(values) + 1

    assert torch.compile(traced, backend="eager", fullgraph=True)(two).item() == 5
    assert torch.fx.symbolic_trace(traced)(two).item() == 5
    leave_ops_alone()
    assert torch.ops.fbgemm.jagged_softmax(two).item() == 4
    with pytest.raises(AttributeError, match="object has no attribute 'mystery'"):
        torch.ops.fbgemm.mystery  # noqa: B018


@pytest.mark.parametrize("ours", OPS)
def test_what_is_hinted_at_is_there(ours: str) -> None:
    # the first dotted or capital name of the hint
    names = re.findall(r"(?:shardwise\.)?(?:\w+\.)*(?:[A-Z]\w+|\w+_\w+)", ours)
    assert names, ours
    for name in names:
        home, _, last = name.rpartition(".")
        home = home or ("shardwise.kernels" if last == "dequantize_rows" else "shardwise")
        assert hasattr(import_module(home), last), f"{home} has no {last}"


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the list of FBGEMM's ops is not here")
def test_every_op_that_is_named_is_one_of_fbgemm() -> None:
    known = set(re.findall(r"^fbgemm::(\w+)", REFERENCE.read_text(), re.MULTILINE))
    exact = {op for ops in OPS.values() for op in ops.split() if not op.endswith("*")}
    assert exact <= known
    # of the others we have nothing, and say so
    assert 60 < sum("nothing of ours" not in op_hint(op) for op in known) < len(known)


def test_install_hints_and_uninstall_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import shardwise.torchrec

    try:
        shardwise.torchrec.install()
        with pytest.raises(AttributeError, match="use shardwise.kernels.invert_permute"):
            torch.ops.fbgemm.invert_permute  # noqa: B018
    finally:
        shardwise.torchrec.uninstall()
    with pytest.raises(AttributeError, match="object has no attribute 'invert_permute'"):
        torch.ops.fbgemm.invert_permute  # noqa: B018
    assert advice("torch.ops.fbgemm").startswith("shardwise has no counterpart of torch.ops.fbgemm")
