#!/usr/bin/env bash
# Runs lint, type checks and the test suite in an environment that it creates. Arguments are passed to pytest.
#   scripts/test.sh           the checks that every change has to pass
#   scripts/test.sh --full    every combination of options instead of every pair of them
#   scripts/test.sh --compiled  the tests of updates, with updates of small parameters compiled as well
#   scripts/test.sh --simgpu  the tests for GPUs, on a GPU simulated in host memory (tests/support/simgpu)
#   scripts/test.sh --gpu     the same tests on a GPU of this machine
#   scripts/test.sh --floor   the tests of trainers with the oldest supported versions of other packages
set -euo pipefail
case "${1:-}" in
    --full) export LOWMEM_FULL=1; shift ;;
    --compiled)
        export LOWMEM_COMPILED=1
        shift
        if [ $# = 0 ]; then set -- tests/tiles tests/rules tests/step tests/layers tests/placements; fi
        ;;
    --gpu | --simgpu)
        if [ "$1" = --gpu ]; then export LOWMEM_GPU=1; else export LOWMEM_SIMGPU=1; fi
        shift
        if [ $# = 0 ]; then set -- tests/simgpu tests/tiles tests/rules tests/step tests/layers tests/hf tests/trainer; fi
        ;;
    --floor) FLOOR=1; shift ;;
esac
if [ -z "${FLOOR:-}" ]; then EXTRAS=dev,docs,judges; else EXTRAS=dev; fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ -z "${FLOOR:-}" ]; then
    ruff check .
    ruff format --check .
    mypy
else
    pip uninstall --quiet --yes triton  # if it is installed, TRL 1.15 also uses it on a CPU, where it cannot work
    set -- tests/trainer tests/hf tests/test_accelerate.py tests/placements/test_zero3.py "$@"
fi
# Two processes with one thread each, because more threads do not speed up small tensors.
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu \
    python -m pytest --numprocesses "${TEST_PROCESSES:-2}" --durations=20 "$@"
