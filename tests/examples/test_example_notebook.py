"""examples/notebook.ipynb gives, cell by cell, what it was committed with. EXPECTTEST_ACCEPT=1 writes it anew.

The notebook is the only source of itself: edit it anywhere, run this with EXPECTTEST_ACCEPT=1, commit it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkout import ROOT
from optional import need

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook after a run of all its cells in a kernel of its own, without what goes to stderr."""
    # a kernel that is spoken to by sockets in a folder needs no free ports
    manager = need("jupyter_client").AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=str(folder / "kernel"), connection_file=str(folder / "kernel.json")
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = need("nbclient").NotebookClient(notebook, km=manager, timeout=120, record_timing=False)
    with patch.dict(os.environ, PYTHONPATH=path):
        asyncio.run(client.async_execute(env=os.environ, cwd=str(folder)))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = without_stderr(cell.outputs)
    return notebook


def without_stderr(outputs: list[Any]) -> list[Any]:
    """What is left, as one text where only stderr stood between two."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def shown(cell: Any) -> list[Any]:
    """What a cell prints and shows."""
    outputs = cell.get("outputs", [])
    assert not [output for output in outputs if output.output_type == "error"]
    return [output.text if output.output_type == "stream" else output.data for output in outputs]


def test_the_notebook_gives_what_it_was_committed_with(tmp_path: Path) -> None:
    need("ipykernel")
    nbformat = need("nbformat")
    committed = nbformat.read(NOTEBOOK, as_version=4)
    run = executed(nbformat.read(NOTEBOOK, as_version=4), tmp_path)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        run.metadata = {name: run.metadata[name] for name in ("kernelspec",)} | {"language_info": {"name": "python"}}
        nbformat.write(run, NOTEBOOK)
        pytest.skip("the notebook was written anew")
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    for before, after in zip(code, [cell for cell in run.cells if cell.cell_type == "code"], strict=True):
        assert shown(after) == shown(before), before.source
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert NOTEBOOK.stat().st_size < 150_000
    assert sum("image/svg+xml" in data for cell in code for data in shown(cell) if not isinstance(data, str)) == 1
