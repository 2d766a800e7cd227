#!/usr/bin/env bash
# Lint, type checks and the test suite, in an environment that it creates. Arguments are passed to pytest.
#   scripts/test.sh           what every change has to pass
#   scripts/test.sh --full    every combination of options instead of every pair of them
set -euo pipefail
if [ "${1:-}" = --full ]; then
    export LOWMEM_FULL=1
    shift
fi
export EXTRAS=dev,judges
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ruff check .
ruff format --check .
mypy
# two processes with one thread each: more threads do not make small tensors faster
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu \
    python -m pytest --numprocesses "${TEST_PROCESSES:-2}" --durations=20 "$@"
