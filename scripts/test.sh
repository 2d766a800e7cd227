#!/usr/bin/env bash
# The whole suite with lint and type checks, in an environment of its own making. Arguments go to pytest.
set -euo pipefail
export EXTRAS=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ruff check .
ruff format --check .
mypy
# two processes of one thread each: small tensors gain nothing from more threads
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu python -m pytest --numprocesses "${TEST_PROCESSES:-2}" "$@"
