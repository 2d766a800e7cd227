"""Batched kernels receive the current addresses of gradients. On the simulated GPU, they compute nothing."""

import pytest
import torch

import lowmem
from benchmarks.engine import without_computing
from lowmem.kernels import Batch, Kernels

simgpu = pytest.importorskip("support.simgpu")
if not hasattr(simgpu, "library"):
    pytest.skip("needs the simulated GPU: scripts/test.sh --simgpu", allow_module_level=True)


def test_kernels_get_the_pointers_of_the_gradients_of_their_step(monkeypatch):
    pointers, launched = [], []
    run = Batch.run

    def noted(batch, grads, *inputs):
        pointers.append([grad.data_ptr() for grad in grads])
        return run(batch, grads, *inputs)

    monkeypatch.setattr(Batch, "run", noted)
    with without_computing(kernels=True):
        monkeypatch.setattr(Kernels, "launch", lambda self, launch, args: launched.append(args[0].clone()))
        params = [torch.nn.Parameter(torch.ones(200, 200, device="cuda")) for _ in range(3)]
        opt = lowmem.FusedOptimizer(params, rule="lion", compile=True)
        allocated = []
        for _ in range(4):
            opt.backward(torch.stack(params).square().sum())
            allocated.append(torch.empty(200, 200, device="cuda"))  # changes the addresses of gradients
    sent = [addresses.tolist() for addresses in launched[:: len(launched) // len(pointers)]]
    assert sent == pointers and len({tuple(addresses) for addresses in pointers}) > 3


def test_batches_are_kept_over_micro_batches(monkeypatch):
    batches, initialize = [], Batch.__init__
    monkeypatch.setattr(Batch, "__init__", lambda self, *args: (batches.append(self), initialize(self, *args))[1])
    with without_computing(kernels=True):
        params = [torch.nn.Parameter(torch.ones(200, 200, device="cuda")) for _ in range(3)]
        opt = lowmem.FusedOptimizer(params, rule="lion", compile=True)
        counts = []
        for _ in range(4):
            for _ in range(2):
                with opt.accumulate():
                    opt.backward(torch.stack(params).square().sum())
            opt.backward(torch.stack(params).square().sum())
            counts.append(len(batches))
    assert counts[0] and counts[1] == counts[3]
