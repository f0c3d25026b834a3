"""When FBGEMM's ops are ours, when its own, and what a program is told where both would be; each in a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import run_python

# what stands for an installed FBGEMM: it registers an op of its own, as loading its library does
REAL = """
import torch
library = torch.library.Library("fbgemm", "DEF")
library.define("invert_permute(Tensor permute) -> Tensor")
library.impl("invert_permute", lambda permute: permute * 0 - 7, "CPU")
"""

PROGRAMS = {
    "torch.ops.fbgemm.X alone finds ours": """
import shardwise.torchrec
shardwise.torchrec.install()
import torch
assert torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 3])).tolist() == [0, 2, 5]
assert torch.ops.fbgemm.asynchronous_complete_cumsum.default._schema.name == "fbgemm::asynchronous_complete_cumsum"
""",
    "import torchrec alone registers ours, as importing the real one does": """
import shardwise.torchrec
shardwise.torchrec.install()
import torchrec
import torch
assert torch._C._dispatch_has_kernel("fbgemm::asynchronous_complete_cumsum")
""",
    "import fbgemm_gpu alone registers ours": """
import shardwise.torchrec
shardwise.torchrec.install()
import fbgemm_gpu
import torch
assert torch._C._dispatch_has_kernel("fbgemm::offsets_range")
import fbgemm_gpu.split_embedding_configs
assert fbgemm_gpu.split_embedding_configs.EmbOptimType.SGD.value == "sgd"
""",
    "a rewritten program has them": """
import shardwise.fbgemm_gpu as fbgemm_gpu
import torch
from shardwise.fbgemm_gpu.split_embedding_configs import EmbOptimType
assert torch.ops.fbgemm.repeat_arange(torch.tensor([1, 2])).tolist() == [0, 0, 1]
assert fbgemm_gpu.split_embedding_configs.EmbOptimType is EmbOptimType
try:
    fbgemm_gpu.mystery
except AttributeError as error:
    assert "no counterpart of fbgemm_gpu.mystery" in str(error), error
""",
    "an op that somebody has registered stays his": """
import torch
library = torch.library.Library("fbgemm", "FRAGMENT")
library.define("offsets_range(Tensor offsets, SymInt range_size) -> Tensor")
library.impl("offsets_range", lambda offsets, size: offsets * 0, "CPU")
import shardwise.fbgemm
assert "offsets_range" not in shardwise.fbgemm.registered_ops()
assert torch.ops.fbgemm.offsets_range(torch.tensor([0, 2]), 2).tolist() == [0, 0]
assert shardwise.fbgemm.register_ops() == []
""",
    "a script that TorchScript compiles finds them": """
import shardwise.torchrec
shardwise.torchrec.install()
import torch

def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)

assert torch.jit.script(offsets_of)(torch.tensor([4, 1])).tolist() == [0, 4, 5]
""",
}

WITH_REAL = {
    "its own are used": """
import shardwise.torchrec
shardwise.torchrec.install()
import torch
assert torch.ops.fbgemm.invert_permute(torch.tensor([1, 0])).tolist() == [-7, -7]
import shardwise.fbgemm
assert shardwise.fbgemm.registered_ops() == []
import sys
assert not hasattr(sys.modules["fbgemm_gpu"], "path")
""",
    "checks of our own kernels leave it alone": """
import sys
from shardwise.perf.selftest.jagged_checks import checks
assert list(checks())
import torch
assert torch.ops.shardwise.permute_tables.default is not None
assert "fbgemm_gpu" not in sys.modules
""",
    "where it is, is known without torch and without the names of TorchRec": """
import sys
from shardwise._installed import installed_fbgemm
assert installed_fbgemm().origin.endswith("fbgemm_gpu.py")
assert not {"torch", "shardwise.migration"} & set(sys.modules)
import shardwise.migration.mirror
assert "torch" not in sys.modules
""",
    "its own are there after import torchrec": """
import shardwise.torchrec
shardwise.torchrec.install()
import torchrec, torch
assert torch._C._dispatch_has_kernel("fbgemm::invert_permute")
""",
    "one that cannot be loaded is named, and ours are there": """
import pathlib, warnings
pathlib.Path("fbgemm_gpu.py").write_text("raise OSError('undefined symbol: ncclOops')")
import shardwise.torchrec
shardwise.torchrec.install()
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert torch.ops.fbgemm.offsets_range(torch.tensor([0, 2]), 2).tolist() == [0, 1]
texts = [str(warning.message) for warning in caught]
assert any("cannot be loaded (OSError: undefined symbol: ncclOops)" in text for text in texts), texts
""",
    "one that is found after ours were registered says so": """
import sys
place = sys.path.pop(0)
import shardwise.torchrec
shardwise.torchrec.install()
import torchrec
sys.path.insert(0, place)
shardwise.torchrec.uninstall()
try:
    import fbgemm_gpu
except ImportError as error:
    assert "cannot be loaded any more: shardwise has registered" in str(error), error
else:
    raise SystemExit("it was loaded")
""",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("claim", PROGRAMS)
def test_without_fbgemm(tmp_path: Path, claim: str) -> None:
    # TorchScript reads the sources of functions
    (tmp_path / "program.py").write_text(PROGRAMS[claim])
    run_python("program.py", folder=tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("claim", WITH_REAL)
def test_where_fbgemm_is_installed(tmp_path: Path, claim: str) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text(REAL)
    run_python("-c", WITH_REAL[claim], folder=tmp_path)
