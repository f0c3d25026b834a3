#!/usr/bin/env bash
# One node's part of a run over several nodes. On each of them:
#
#   torchrun.sh NODE NODES ADDRESS PROGRAM [ARGUMENT ...]
#
# NODE counts from 0, and ADDRESS is where the others reach node 0. NODES may be a range, 1:4 say: the run then goes on
# with the nodes that are there. From the environment, with what they are without:
#
#   RANKS=2             ranks of each node, one a GPU
#   PORT=29400          of node 0, where the nodes meet
#   JOB=shardwise       a name that no other run at ADDRESS and PORT has
#   LOCAL_ADDR          where the others reach this node; without, the address from which it reaches node 0
#   RESTARTS=100        how often the ranks of this node may be started anew
#   JOIN_S=600          how long it waits for the other nodes, seconds
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: torchrun.sh NODE NODES ADDRESS PROGRAM [ARGUMENT ...]" >&2
    exit 2
fi
node=$1 nodes=$2 address=$3
shift 3

# where torchrun looks it up by the host's name, 127.0.1.1 may come out
if [ -z "${LOCAL_ADDR:-}" ]; then
    LOCAL_ADDR=$(python3 -c '
import socket, sys
family, kind, proto, _, address = socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, kind, proto) as probe:  # sends nothing
    probe.connect(address)
    print(probe.getsockname()[0])' "$address")
fi

# each restart has a store of its own: docs/howto/reliability.md
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$nodes" --nproc_per_node="${RANKS:-2}" --max-restarts="${RESTARTS:-100}" \
    --rdzv-backend=c10d --rdzv-endpoint="$address:${PORT:-29400}" --rdzv-id="${JOB:-shardwise}" \
    --rdzv-conf="is_host=$((node == 0)),join_timeout=${JOIN_S:-600}" --local-addr="$LOCAL_ADDR" "$@"
