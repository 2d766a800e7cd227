#!/usr/bin/env bash
# Starts a run on all GPUs of this machine:  scripts/jobs/torchrun.sh CONFIG [--KEY VALUE ...]
# On several machines, start it on each of them: NODES=4 HEAD=first-machine:29500 scripts/jobs/torchrun.sh CONFIG ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
if [ "${NODES:-1}" -gt 1 ]; then
    where=(--nnodes "$NODES" --rdzv_backend c10d --rdzv_id "${RUN_ID:-lowmem}"
           --rdzv_endpoint "${HEAD:?set HEAD=host:port of the first machine}")
else
    where=(--standalone)
fi
exec torchrun "${where[@]}" --nproc_per_node "$processes" -m lowmem sft --config "$@"
