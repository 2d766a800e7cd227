"""The simulated GPU reports races, reads of uninitialized memory and synchronization that a real GPU would have."""

import pytest
import torch

simgpu = pytest.importorskip("support.simgpu")
if not hasattr(simgpu, "library"):
    pytest.skip("needs the simulated GPU: scripts/test.sh --simgpu", allow_module_level=True)

SIZE = 1000


@pytest.fixture
def side():
    return torch.cuda.Stream()


def ones(**options):
    return torch.ones(SIZE, device="cuda", **options)


def pinned(value):
    return torch.full((SIZE,), value, device="cpu", pin_memory=True)


def test_fresh_and_freed_memory():
    for _ in range(2):
        fresh = torch.empty(SIZE, device="cuda")
        with simgpu.provoke("unwritten") as events:
            assert not fresh.add(1).isfinite().any()
        assert events[0].what.startswith("aten::add")
        fresh.fill_(1)
        del fresh


@pytest.mark.parametrize("order", [None, "a stream waits", "the host waits"])
def test_two_streams_and_the_same_memory(order, side):
    value = ones()
    with simgpu.provoke("race") as events:
        if order:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value.add_(1)
        if order == "a stream waits":
            torch.cuda.current_stream().wait_stream(side)
        elif order:
            side.synchronize()
        value.add_(1)
    assert bool(events) == (order is None)


def test_memory_freed_too_early(side):
    value = ones()
    side.wait_stream(torch.cuda.current_stream())
    with simgpu.provoke("race") as events, torch.cuda.stream(side):
        host = pinned(0.0)
        host.copy_(value, non_blocking=True)
        del value
    assert "freed while" in events[0].what
    side.synchronize()
    assert host.isnan().all()


def test_pinned_memory_that_is_written_while_it_is_copied():
    host, value = pinned(1.0), torch.zeros(SIZE, device="cuda")
    value.copy_(host, non_blocking=True)
    host.fill_(2.0)
    with simgpu.provoke("race") as events:
        torch.cuda.synchronize()
    assert "written by the host" in events[0].what


@pytest.mark.parametrize("wait", [torch.Tensor.item, torch.Tensor.nonzero, bool, torch.Tensor.cpu])
def test_waits_of_the_host_are_reported(wait):
    value = torch.ones(1, device="cuda")
    with simgpu.watch("sync", "wait") as events:
        wait(value)
    assert events[0].kind == "sync" and "test_device.py" in simgpu.summary(events)
