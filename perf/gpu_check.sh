#!/usr/bin/env bash
# Everything that needs a GPU, in one command, on a machine without network or install: python3 with torch and triton.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: perf/gpu_check.sh [options of gpu_check.py, as --keep --sections suite]

On this machine's GPU, what answers an open question first: bandwidth and latencies, every op against its reference and
the gpu tests, a profile by kernel, an A/B of variants, the same bits again and again, the tuner, collectives of one
card, tables larger than the device beside their goals, the regression suite beside the peers that are importable,
compute-sanitizer last or after a check that failed.
Takes under 9.5 minutes; what it had no time for is named, and a second call with --keep --sections does it.
Writes into ${OUT:-runs/gpu_check}:
  gpu_check.json   all in one: versions, device, and each section's status and numbers; written after every section
  gpu_check.html   the same as a page: what to take, predictions beside measurements
  perf.json        the suite alone, for `shardwise perf report` and `perf compare`
  tuned.json       the tuned configs, for kernels/tuned/<device>.json
  gpu_check.txt    what the script printed
Exit status: 0 if every section was ok.

  PYTHON=...                 the interpreter (default: python3)
  COMPILED=...               kernels that `python -m shardwise.perf.gpu_scripts.gpu_precompile --out FOLDER` compiled elsewhere
  --device cpu --small       prove the script on a machine without a GPU
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
out=${OUT:-runs/gpu_check}
python=${PYTHON:-python3}
compiled=${COMPILED:-$out/compiled}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out" || exit 2

"$python" -m shardwise.perf.gpu_scripts.gpu_check --isolate --limit-s 550 --compiled "$compiled" --out "$out/gpu_check.json" "$@" 2>&1 |
    tee "$out/gpu_check.txt"
exit "${PIPESTATUS[0]}"
