#!/usr/bin/env bash
# Starts a run on all GPUs of this machine:  scripts/jobs/accelerate.sh CONFIG [--KEY VALUE ...]
# On several machines, start it on each of them: NODES=4 NODE=0 HEAD=first-machine PORT=29500 scripts/jobs/accelerate.sh CONFIG ...
# (NODE counts from 0). To shard the model over the ranks, set deepspeed or fsdp in CONFIG.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
nodes="${NODES:-1}"
exec accelerate launch --multi_gpu --num_machines "$nodes" --machine_rank "${NODE:-0}" \
    --num_processes "$((processes * nodes))" --main_process_ip "${HEAD:-127.0.0.1}" \
    --main_process_port "${PORT:-29500}" --mixed_precision no --dynamo_backend no -m lowmem sft --config "$@"
