#!/usr/bin/env bash
# Runs lint, type checks and the test suite in an environment that it creates. Arguments are passed to pytest.
#   scripts/test.sh           the checks that every change must pass
#   scripts/test.sh --full    all combinations of options, all cases of judges and all slow tests, instead of samples
#   scripts/test.sh --compiled  the tests of updates, also compiling updates of small parameters
#   scripts/test.sh --simgpu  the tests for GPUs, on a GPU simulated in host memory (tests/support/simgpu)
#   scripts/test.sh --gpu     the same tests on a GPU of this machine
#   scripts/test.sh --triton  the tests of updates, with the GPU's kernels in Triton's interpreter
#   scripts/test.sh --stack NAME  the tests of trainers and of the engine with the versions in constraints/NAME.txt, such as floor
#                             (the oldest) or newest; updates docs/reference/tested.md
set -euo pipefail
engine=(tests/tiles tests/rules tests/step tests/layers tests/placements)
trainers=(tests/trainer tests/hf tests/test_accelerate.py)
record=
case "${1:-}" in
    --full) export LOWMEM_FULL=1; shift ;;
    --compiled)
        export LOWMEM_COMPILED=1
        shift
        if [ $# = 0 ]; then set -- "${engine[@]}"; fi
        ;;
    --gpu | --simgpu)
        if [ "$1" = --gpu ]; then export LOWMEM_GPU=1; else export LOWMEM_SIMGPU=1; fi
        shift
        if [ $# = 0 ]; then set -- tests/simgpu tests/tiles tests/rules tests/step tests/layers tests/placements tests/hf tests/trainer; fi
        ;;
    --triton)
        export TRITON_INTERPRET=1
        shift
        if [ $# = 0 ]; then set -- tests/kernels tests/rules tests/step tests/placements; fi
        ;;
    --stack)
        STACK="${2:?which one? $(ls constraints)}"
        EXTRAS=tests
        shift 2
        if [ $# = 0 ]; then
            record="runs/$STACK.xml"
            set -- "${trainers[@]}" "${engine[@]}" --junit-xml "$record"
        fi
        ;;
esac
EXTRAS="${EXTRAS:-dev,docs,judges}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ -z "${STACK:-}" ]; then
    ruff check .
    ruff format --check .
    mypy
fi
# Three processes with one thread each keep two cores busy: some tests wait for processes that they start, and more threads do
# not speed up small tensors.
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu \
    python -m pytest --numprocesses "${TEST_PROCESSES:-3}" --durations=20 "$@" || failed=$?
if [ -n "$record" ]; then python scripts/stacks.py "$STACK" "$record"; fi
if [ "${STACK:-}" = newest ] && [ "${failed:-0}" = 1 ]; then
    echo "warning: some tests fail with the newest versions" >&2
    failed=0
fi
exit "${failed:-0}"
