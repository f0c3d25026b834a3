"""An exported program gives the bits of its model, whatever the model takes and gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inference_models import CASES
from test_quant_managed_collision import batch_of, trained

from shardwise.inference import Signature, export_model, load_program, quantize_inference_model
from shardwise.inference.tracing import named_outputs


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_the_bits_of_its_model_at_any_batch_size(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.model()
    facts = export_model(model, tmp_path / "out", signature=case.signature, call=case.call)
    program = load_program(tmp_path / "out")
    assert program.facts == facts
    assert [output.name for output in facts.outputs] == case.outputs
    for size in (0, 1, 2, 7):
        batch = case.batch(size)
        wanted, found = case.wanted(model, batch), program(**batch)
        assert list(found) == case.outputs
        for output in case.outputs:
            torch.testing.assert_close(found[output], wanted[output], rtol=0, atol=0)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_ids_behind_maps_may_be_any(tmp_path: Path, pooled: bool) -> None:
    model = quantize_inference_model(trained(pooled))
    signature = Signature(["g", "f", "h"])
    facts = export_model(model, tmp_path / "out", signature=signature, call=lambda model, ids, _: model(ids)[0])
    assert [feature.ids for feature in facts.features] == [None, None, None]
    assert all(table.mapped for table in facts.tables)
    batch = batch_of(9)
    found = load_program(tmp_path / "out")(batch.values(), batch.lengths())
    wanted = named_outputs(model(batch)[0])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["pooled", "sequence"])
def test_a_traced_model_refuses_bad_ids(name: str) -> None:
    """A compiler left the check of ids out, since what it wrote to was read by nobody: a bad id became a row of
    zeros."""
    case = CASES[name]
    compiled: Any = torch.compile(case.model(), backend="aot_eager")
    batch = case.batch(3)
    case.wanted(compiled, batch)
    batch["values"][0] = 1000
    with pytest.raises(IndexError, match=r"id 1000 is outside \[0, 5"):
        case.wanted(compiled, batch)
