#!/usr/bin/env bash
# Starts a run on all GPUs of this machine:  scripts/jobs/deepspeed.sh CONFIG [--KEY VALUE ...]
# On several machines, start it on the first one: HOSTFILE=hosts scripts/jobs/deepspeed.sh CONFIG ...
# (one line per machine, such as "host1 slots=8"). The first machine connects to the others by ssh without a password.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
command -v deepspeed >/dev/null || { echo 'DeepSpeed is not installed: pip install ".[deepspeed]" in the clone' >&2; exit 2; }
if [ -n "${HOSTFILE:-}" ]; then
    where=(--hostfile "$HOSTFILE")
else
    where=(--num_gpus "$processes" --master_port "${PORT:-29500}")
fi
exec deepspeed "${where[@]}" --module lowmem sft --config "$@"
