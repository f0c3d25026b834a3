#!/usr/bin/env bash
# Everything that needs a GPU, in one command, on a machine without network or install: python3 with torch and triton.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: perf/gpu_check.sh [options of gpu_check.py, as --sections suite]

On this machine's GPU: checks every op against its reference, tunes the kernels, runs the regression suite beside the
peers that are importable, runs itself under compute-sanitizer where that is installed, and the gpu tests where pytest
is. Takes under 9 minutes. Writes into ${OUT:-runs/gpu_check}:
  gpu_check.json   all in one: versions, device, and each section's status and numbers
  perf.json        the suite alone, for `shardwise perf report` and `perf compare`
  tuned.json       the tuned configs, for kernels/tuned/<device>.json
  gpu_check.txt    what the script printed
  pytest.txt       what `pytest -m gpu` printed, if it ran
Exit status: 0 if every section and every test passed.

  PYTHON=...                 the interpreter (default: python3)
  --device cpu --small       prove the script on a machine without a GPU
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
out=${OUT:-runs/gpu_check}
python=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out" || exit 2

"$python" -m shardwise.perf.gpu_check --isolate --limit-s 430 --out "$out/gpu_check.json" "$@" 2>&1 | tee "$out/gpu_check.txt"
status=${PIPESTATUS[0]}

if "$python" -c "import pytest" 2>/dev/null; then
    # a machine without hypothesis loses the files that import it, not the others
    timeout 95 "$python" -m pytest -q -m gpu --continue-on-collection-errors -p no:cacheprovider tests/test_kernels_*.py \
        2>&1 | tee "$out/pytest.txt" | tail -15
    tests=${PIPESTATUS[0]}
    # 5: nothing was collected
    if [ "$tests" -ne 0 ] && [ "$tests" -ne 5 ]; then status=1; fi
else
    echo "pytest is not importable: the gpu tests did not run"
fi
exit "$status"
