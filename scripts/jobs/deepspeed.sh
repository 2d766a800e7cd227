#!/usr/bin/env bash
# One run over the GPUs of this machine:  scripts/jobs/deepspeed.sh CONFIG [key=value ...] [--resume]
# Over several machines, on the first one: HOSTFILE=hosts scripts/jobs/deepspeed.sh CONFIG ...
# (a line a machine, such as "host1 slots=8"; the others are reached by ssh without a password).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
if [ -n "${HOSTFILE:-}" ]; then
    where=(--hostfile "$HOSTFILE")
else
    where=(--num_gpus "$processes" --master_port "${PORT:-29500}")
fi
exec deepspeed "${where[@]}" --module lowmem train "$@"
