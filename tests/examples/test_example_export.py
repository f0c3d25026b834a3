"""The example of exports runs as printed."""

from __future__ import annotations

from forked import run_script


def test_export_serves_and_reads_what_it_wrote() -> None:
    said = run_script("examples/export.py").splitlines()
    assert said[:3] == [
        "user: int8, 3.56x smaller than fp32", "clicked: int4, 6.40x smaller than fp32", "same bits: True",
    ]  # fmt: skip
    assert said[3].startswith("IndexError: feature 'clicked' (table 'clicked'), sample 0: id 1000 is outside [0, 1000)")
    assert said[4] == "rows: (2, 32) pooled: (2, 32)"
    assert said[5].startswith("['probability'] [0.")
    assert said[6].startswith("ModelDamaged: clicks/program.pt2 has 0 bytes, it was written with")
