"""Triton is imported, and kernels are made, when one is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.kernels import _op

PROGRAM = """
import sys
from shardwise import EmbeddingBagCollection
from shardwise.kernels import _op, rule_named
from shardwise.kernels.jagged import segments
from shardwise.kernels.lookup import pooled, sequence
assert "triton" not in sys.modules, "imported"
early = segments._gather_kernel
assert early.arg_names[0] == sequence._gather_kernel.arg_names[0]
made = [type(kernel).__name__ for kernel in (pooled._pooled_lookup_kernel, sequence._gather_kernel)]
assert made == ["JITFunction"] * 2, made
assert segments._gather_kernel is sequence._gather_kernel is early.made
assert pooled.tl is sys.modules["triton.language"]
assert type(rule_named("adam").in_triton).__name__ == "JITFunction"
"""


@pytest.mark.skipif(not _op.HAS_TRITON or _op.INTERPRETED, reason="needs triton that compiles")
def test_triton_is_imported_when_a_kernel_is_first_used() -> None:
    """Importing a collection took half its time for triton, of which a CPU uses nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
