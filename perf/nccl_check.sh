#!/usr/bin/env bash
# Sharded training on 2 to 8 GPUs of this machine over NCCL; python3 with torch and triton, no network, no install.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: perf/nccl_check.sh [options of nccl_check.py, as --sections failure]

A process for each GPU: train steps of every sharding type, codecs, pipelines, accumulation and checkpoints against one
process, bit for bit; times and bandwidths of exchanges; and a rank that fails. Ends within 5 minutes, and writes
  ${OUT:-runs/nccl_check}/nccl_check.json   versions, device, and each section's status and numbers
  ${OUT:-runs/nccl_check}/nccl_check.txt    what was printed
Exit status: 0 if every section passed.

  PYTHON=...                 the interpreter (default: python3)
  RANKS=...                  processes (default: one for each GPU, 8 at most; 2 with --device cpu)
  --device cpu --small       prove the script on a machine without a GPU, over gloo
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
out=${OUT:-runs/nccl_check}
python=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out" || exit 2
gpus=$("$python" -c "import torch; print(min(8, torch.cuda.device_count()))")
case " $* " in *" cpu "*) gpus=2 ;; esac
ranks=${RANKS:-$gpus}
if [ "$ranks" -lt 2 ]; then
    echo "$ranks GPU: nccl_check needs 2 or more; perf/gpu_check.sh runs it on one"
    exit 2
fi

timeout 300 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m shardwise.perf.gpu_scripts.nccl_check --out "$out/nccl_check.json" "$@" 2>&1 | tee "$out/nccl_check.txt"
exit "${PIPESTATUS[0]}"
