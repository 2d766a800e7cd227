"""A backward that runs out of memory reports the original error."""

import resource
from pathlib import Path

import pytest
import torch
from support.processes import CONTEXT, PATIENCE

import lowmem
from lowmem.errors import CheckpointError
from lowmem.run.boundary import is_out_of_memory


def limited(end):
    sizes = (4096, 4096), (4096, 64), (64, 64)
    layers = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes))
    alone = {"policy": "immediate", "batching": False, "compile": False}
    opt = lowmem.FusedOptimizer(layers.named_parameters(), "lomo", lr=1e-3, **alone)
    opt.backward(layers(torch.ones(2, 4096)).sum())
    loss = layers(torch.ones(2, 4096)).sum()

    def limit(grad):  # the gradient of the first layer has not been computed yet
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))

    layers[1].weight.register_hook(limit)
    with pytest.raises(RuntimeError) as died:
        opt.backward(loss)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    end.send((is_out_of_memory(died.value), died.value.__notes__[0]))


def test_a_process_that_runs_out_of_host_memory():
    ours, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=limited, args=(its,), daemon=True)
    process.start()
    its.close()
    known, note = ours.recv()
    process.join(PATIENCE)
    assert known and "step 2 is torn" in note


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (OSError(28, "No space left on device"), False),
        (CheckpointError("memory"), False),
    ],
)
def test_errors_of_memory_are_recognized(error, expected):
    assert is_out_of_memory(error) == expected
