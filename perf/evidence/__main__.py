"""Run comparisons with the peers and keep what they print: `python -m shardwise.perf.evidence [NAME ...] [--write]`.

Without a name all are run that have a document. `NAME --help` lists the options of one. Exit status 1: something is not
as it has to be; 2: a peer is not installed.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from shardwise.perf.evidence.report import ROOT, Report
from shardwise.perf.suite.options import FLAG, Options, parser_of

# name -> module of this folder, and the document that keeps what is printed, below its mark
KNOWN = {
    "operations": ("compare_torchrec", "docs/evidence/beside_torchrec.md"),
    "sharding": ("compare_sharding", "docs/evidence/beside_torchrec_sharding.md"),
    "canary": ("canary.compare", "docs/howto/canary.md"),
    "entropy": ("clicks.entropy", "docs/evidence/beside_torchrec_entropy.md"),
    "round_trips": ("clicks.round_trips", "docs/evidence/beside_torchrec_round_trips.md"),
    "checkpoint": ("compare_checkpoint", "docs/howto/checkpoints_convert.md"),
    "quant": ("compare_quant", "docs/evidence/beside_fbgemm_quant.md"),
    "parity": ("parity", "docs/evidence/parity.md"),
    # writes the whole document by itself
    "planner_heldout": ("planner_heldout", ""),
    "pipeline_overlap": ("pipeline_overlap", ""),
    "managed_collision": ("modules.managed_collision", ""),
    "pools": ("modules.pools", ""),
    "criteo_rows": ("clicks.criteo_rows", ""),
    "tier_step": ("tiers.tier_step", ""),
    "tier_files": ("tiers.file_rows", ""),
    "tier_bits": ("tiers.bits", ""),
    "tier_larger": ("tiers.larger", ""),
    "tier_soak": ("tiers.soak", ""),
    "tier_times": ("tiers.times", ""),
    "two_nodes": ("nodes.two_nodes", ""),
    "planner": ("compare_planner", ""),
    "planner_plans": ("compare_planner_plans", ""),
    "same_bits": ("same_bits.compare", ""),
    "fbgemm_ops": ("fbgemm.ops", "docs/evidence/beside_fbgemm_ops.md"),
    "fbgemm_cost": ("fbgemm.cost", "docs/reference/fbgemm.md"),
    "fbgemm_inference": ("fbgemm.inference_tables", "docs/evidence/beside_fbgemm_inference.md"),
    "fbgemm_tables": ("fbgemm.tables", "docs/evidence/beside_fbgemm_tables.md"),
}


def mark(name: str) -> str:
    """The line below which a document keeps what is printed."""
    return f"<!-- below: as `make evidence NAME={name}` printed it -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one in this process, or several one after the other."""
    given = list(sys.argv[1:] if argv is None else argv)
    names = [argument for argument in given if argument in KNOWN]
    if len(names) == 1:
        return _run(names[0], [argument for argument in given if argument != names[0]])
    asked: Options = {
        "names": {"nargs": "*", "metavar": "NAME", "help": f"of {', '.join(KNOWN)}"},
        "--write": {**FLAG, "help": "keep what is printed in the documents"},
    }
    parser = parser_of(asked, "evidence", __doc__)
    options = parser.parse_args(given)
    if unknown := [name for name in options.names if name not in KNOWN]:
        parser.error(f"there is no evidence {unknown[0]!r}; there is {', '.join(KNOWN)}")
    status = 0
    for name in names or [name for name, (_, document) in KNOWN.items() if document]:
        command = [sys.executable, "-m", "shardwise.perf.evidence", name, *(["--write"] if options.write else [])]
        status = max(status, subprocess.call(command))
    return status


def _run(name: str, arguments: Sequence[str]) -> int:
    module, document = KNOWN[name]
    evidence: Any = importlib.import_module(f"shardwise.perf.evidence.{module}")
    write = {**FLAG, "help": f"keep what is printed in {document or 'its files'}"}
    parser = parser_of({"--write": write, **getattr(evidence, "OPTIONS", {})}, f"evidence {name}", evidence.__doc__)
    options = parser.parse_args(arguments)
    page = ROOT / document
    if options.write and document and mark(name) not in page.read_text(encoding="utf-8"):
        parser.error(f"{document} has no line {mark(name)}")
    # of dtypes and modules that torch is about to drop
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        report: Report = evidence.run(options)
    except ImportError as error:
        print(f"evidence {name} needs a peer ({error}): docs/evidence/beside_torchrec.md tells how", file=sys.stderr)
        return 2
    print(report.text)
    if options.write and document:
        before = page.read_text(encoding="utf-8").partition(mark(name))[0]
        page.write_text(f"{before}{mark(name)}\n\n{report.text}", encoding="utf-8")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
