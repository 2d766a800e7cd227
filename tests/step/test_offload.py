"""The gradient store returns gradients unchanged, and sums micro-batches exactly as `.grad` does."""

import functools
import math
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import simgpu
from support.devices import seeded
from support.nets import give_gradients, records_of

import lowmem
from lowmem.options import FusedConfig
from lowmem.rules import ParamSpec, StateSpec, UpdateRule
from lowmem.step import policies
from lowmem.step.offload import GradientStore, powers_of_two
from lowmem.tiles.layout import View

# A host store is meant for another device's gradients; on a CPU it copies from memory to memory, without streams.
KINDS = pytest.mark.parametrize("kind", ["resident", "mixed", "host"])


def make_store(kind):
    return GradientStore({"resident": math.inf, "mixed": 100, "host": 0}[kind])


@pytest.fixture
def store(request, monkeypatch):
    """The store of `kind`, which is used by all optimizers that the test creates."""
    store = make_store(request.getfixturevalue("kind"))
    monkeypatch.setattr(policies, "GradientStore", lambda budget: store)
    return store


def same(one, other):
    """Compares values, strides and dtype."""
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


# -- stored gradients --------------------------------------------------------------------------------------------------

GRADIENTS = [
    lambda: torch.randn(()),
    lambda: torch.randn(0),
    lambda: torch.randn(1025),
    lambda: torch.randn(3, 7),
    lambda: torch.randn(6, 5).t(),
    lambda: torch.randn(4, 3, 5).permute(2, 0, 1),
    lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.tensor([[float("inf"), -float("inf")], [0.0, -0.0]]),
]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_gradients_are_returned_unchanged(kind, dtype):
    """Dtype and strides are preserved too, with gradients of other sizes in the same store and over several steps."""
    store, records = make_store(kind), None
    for _ in range(3):
        grads = [make_gradient().to(dtype) for make_gradient in GRADIENTS]
        records = records or records_of(*(torch.nn.Parameter(torch.empty_like(grad)) for grad in grads))
        for record, grad in reversed(list(zip(records, grads, strict=True))):
            store.keep(record, grad.clone())
        store.begin()
        assert all(same(store.get(record), grad) for record, grad in zip(records, grads, strict=True))
        drained = []
        for record, grad in store.drain(records):
            drained.append((record.name, grad))
            assert record not in store
        assert [name for name, _ in drained] == [record.name for record in records]
        assert all(same(actual, grad) for (_, actual), grad in zip(drained, grads, strict=True))


# -- sums of micro-batches ---------------------------------------------------------------------------------------------


def seen(t):
    return {"seen": t.grad}


class Witness(UpdateRule):
    """A rule that changes no weight and saves the gradient that rules receive: in float32, unrounded."""

    name = source = keeps = "witness"
    defaults = {"lr": 0.0}  # noqa: RUF012

    def check(self, hyper):
        pass

    def spec(self, name, shape, hyper):
        channels_first_or_last = View((0,), (1,), (2, 3))
        view = channels_first_or_last if len(shape) == 4 else View.vector(len(shape))
        return ParamSpec(view, {"seen": StateSpec("full")})

    def update(self, sweep, spec, state):
        sweep.apply(seen, full={"seen": state["seen"]})


SHAPES = [(3, 4), (5,), (2, 3, 2), (), (20_000,)]


def watched(dtype=torch.float32, shapes=SHAPES, **options):
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    options = {"policy": "deferred", "state_storage": "float32", **options}
    return params, lowmem.FusedOptimizer(params, rule=Witness(), **options)


def micro_batches(count, dtype, seed=0):
    """Returns lists of gradients. Parameter 1 has one in the first micro-batch only, parameter 2 in the last only."""
    source = seeded(seed)
    drawn = [[torch.randn(shape, generator=source).to(dtype) for shape in SHAPES] for _ in range(count)]
    for n, grads in enumerate(drawn):
        grads[1] = grads[1] if n == 0 else None
        grads[2] = grads[2] if n == count - 1 else None
    return drawn


def give_step(opt, params, steps):
    for n, grads in enumerate(steps, start=1):
        with opt.accumulate() if n < len(steps) else nullcontext():
            give_gradients(opt, *zip(params, grads, strict=True))


def as_torch_sums(params, steps):
    """Returns the `.grad` of such parameters after the backwards of all micro-batches."""
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for grads in steps:
        pairs = zip(copies, grads, strict=True)
        sum((param * grad).sum().float() for param, grad in pairs if grad is not None).backward()
    return [param.grad for param in copies]


def assert_seen(opt, params, steps):
    for param, want in zip(params, as_torch_sums(params, steps), strict=True):
        assert torch.equal(opt.state[param]["seen"], want.float())


@pytest.mark.parametrize(
    ("kind", "count", "dtype", "sums"),
    [
        *((kind, 7, "float32", "float32") for kind in ("resident", "mixed", "host")),
        ("resident", 1, "bfloat16", "gradient"),
        ("mixed", 2, "float16", "gradient"),
        ("host", 7, "bfloat16", "gradient"),
    ],
)
def test_sums_equal_grad(kind, dtype, sums, count, store):
    """Sums are bitwise equal, and the sums of one step do not affect the next one."""
    dtype = getattr(torch, dtype)
    params, opt = watched(dtype, accumulation_dtype=sums)
    for step in range(3):
        steps = micro_batches(count, dtype, seed=step)
        give_step(opt, params, steps)
        assert_seen(opt, params, steps)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_float32_sums_of_narrow_gradients(kind, dtype, store, monkeypatch):
    """A sum of seven numbers rounds six times, by at most 2⁻²⁴ each; sums in 16 bits are off by far more."""
    for name in ("CPU_TILE", "GPU_TILE"):  # the largest gradient is added in three tiles
        monkeypatch.setattr(f"lowmem.tiles.stored.{name}", 1 << 13)
    params, opt = watched(dtype, accumulation_dtype="float32")
    steps = micro_batches(7, dtype)
    give_step(opt, params, steps)
    for n, (param, rounded) in enumerate(zip(params, as_torch_sums(params, steps), strict=True)):
        gradients = [grads[n].double().cpu().numpy() for grads in steps if grads[n] is not None]
        exact, size = np.sum(gradients, axis=0), np.sum(np.abs(gradients), axis=0)
        allowed = 6 * 2.0**-24 * size
        actual = opt.state[param]["seen"].double().cpu().numpy()
        assert (np.abs(actual - exact) <= allowed).all()
        if len(gradients) > 1 and param.numel() > 1:
            assert (np.abs(rounded.double().cpu().numpy() - exact) > allowed).any()


@KINDS
def test_a_failed_backward_leaves_no_gradients(kind, store):
    """Earlier micro-batches of the step are dropped too, and the step can be repeated."""
    params, opt = watched()
    steps = micro_batches(3, torch.float32)
    give_step(opt, params, steps)  # fills the store's buffers
    with opt.accumulate():
        give_gradients(opt, *zip(params, steps[0], strict=True))
    handle = params[0].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError) as died:
        give_gradients(opt, (params[0], steps[1][0]), (params[4], steps[1][4]))
    handle.remove()
    assert "the 1 micro-batch(es) before it were dropped too" in died.value.__notes__[0]
    opt.state_dict()  # raises if a step is torn or incomplete
    assert opt.last_step.step == opt.named_state_dict()["step"] == 1
    fresh = micro_batches(2, torch.float32, seed=9)
    give_step(opt, params, fresh)
    assert_seen(opt, params, fresh)


@pytest.mark.parametrize(("kind", "dtype"), [("resident", torch.float32), ("host", torch.bfloat16)])
def test_channels_last(kind, dtype, store):
    """Gradients with different strides are still summed and measured element by element."""
    shape, last = (2, 3, 4, 5), {"memory_format": torch.channels_last}
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype).to(**last))
    options = {"policy": "deferred", "clip_norm": 1e9, "accumulation_dtype": "gradient"}
    opt = lowmem.FusedOptimizer([param], rule=Witness(), **options)
    steps = [[torch.randn(shape).to(dtype)], [torch.randn(shape).to(dtype).to(**last)]]
    give_step(opt, [param], steps)
    (want,) = as_torch_sums([param], steps)
    assert want.stride() == param.stride() != torch.zeros(shape).stride()
    assert_seen(opt, [param], steps)
    assert opt.last_step.grad_norm.item() == pytest.approx(np.linalg.norm(want.double().cpu().numpy()), rel=1e-6)


# -- in pinned memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [1, 2, 3, 255, 257, 8_192, 4096 * 14336 * 2, 128256 * 4096 * 2, 151936 * 4096 * 4, (1 << 30) + 1]
)
def test_pinned_memory_is_not_rounded(size):
    """torch rounds each pinned allocation up to a power of two, which could almost double the memory."""
    sizes = powers_of_two(size)
    assert all(block & (block - 1) == 0 for block in sizes)
    assert size <= sum(sizes) <= size * 1.01 + 1
    assert len(sizes) <= 8


@pytest.mark.parametrize(
    ("option", "budget"), [("auto", None), ("host", 0), ("device", math.inf), ("4GiB", 4 << 30), ("100 MB", 10**8)]
)
def test_the_store_is_chosen_by_option_and_device(option, budget):
    """On a CPU, host and device share one memory, so nothing is copied."""
    for device, expected in (("cpu", math.inf), ("meta", budget)):
        param = torch.nn.Parameter(torch.zeros(3, device=device))
        parameters = SimpleNamespace(config=FusedConfig(store=option), records={param: None})
        policy = policies.Deferred(parameters, SimpleNamespace(clipping=None, cycle=None), reason="")
        assert policy._store._budget == expected


# -- on the device while memory is free --------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or a simulated one")
TOTAL = 16 * 1000  # bytes of the device, of which 1000 are left free
SPLITS = [0, 0.1, 0.5, 1.0]


def with_free_memory(monkeypatch, free):
    """Makes the device report `free()` bytes as free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free(), TOTAL))
    for figure in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, figure, lambda device=None: 0)


def steps_with(monkeypatch, share, count, **options):
    """Returns the weights after steps with this share of gradient bytes on the device. The third overflows."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        inputs = torch.randn(4, count, 3, 20)
    net = net.to("cuda")
    everything = sum(param.nbytes for param in net.parameters())
    opt = lowmem.FusedOptimizer(
        net.named_parameters(), "adamw", policy="deferred", store="auto", compile=False, **options
    )
    used = opt._loop.policy._store._bytes
    reserve = TOTAL // 16
    with_free_memory(monkeypatch, lambda: share * everything - used[net[0].weight.device] + reserve)
    for step, batches in enumerate(inputs.cuda()):
        for n, x in enumerate(batches, start=1):
            with opt.accumulate() if n < count else nullcontext():
                opt.backward(net(x).square().mean() * (math.inf if step == 2 else 1.0))
    return [param.detach().cpu() for param in net.parameters()], opt


@on_gpu
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("share", SPLITS)
def test_every_split_has_the_same_bits(share, count, monkeypatch):
    """Clipping, an overflow and accumulation give the bits of a store that is entirely on the host."""
    options = {"clip_norm": 0.1, "loss_scale": "dynamic"}
    weights, opt = steps_with(monkeypatch, share, count, **options)
    others, _ = steps_with(monkeypatch, 0, count, **options)
    assert all(map(torch.equal, weights, others))
    assert opt.nonfinite_steps == 1
    store, everything = opt._loop.policy._store, sum(weight.nbytes for weight in weights)
    on_host = sum(piece.nbytes for pieces in store._buffers.values() for piece in pieces)
    assert everything * (1 - share) <= on_host <= everything * (1 - share) * 1.01 + 1600 * (0 < share < 1)


@pytest.mark.skipif(not hasattr(simgpu, "library"), reason="needs the simulated GPU")
@pytest.mark.parametrize("share", SPLITS)
def test_the_traffic_of_a_step(share, monkeypatch):
    """Each offloaded gradient is copied to the host once and back once. The host waits only for the previous step's
    report, and launches at most twice as many kernels as without clipping.
    """
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(10)))
    everything, reserve = sum(param.nbytes for param in net.parameters()), TOTAL // 16
    loss = functools.partial(lambda net, x: net(x).square().mean(), net, torch.randn(4, 64))
    counted = {}
    for options in ({"policy": "immediate"}, {"clip_norm": 0.1}):
        opt = lowmem.FusedOptimizer(net.named_parameters(), "adamw", compile=False, batching=False, **options)
        if opt.policy == "deferred":
            used = opt._loop.policy._store._bytes
            with_free_memory(monkeypatch, lambda used=used: share * everything - sum(used.values()) + reserve)
        for _ in range(2):  # states and the order of gradients are known in the second step
            before = simgpu.library.sim_launches()
            with simgpu.watch("async", "wait", "sync") as events:
                opt.backward(loss())
            counted[opt.policy] = simgpu.library.sim_launches() - before, events
        opt.remove()
    launches, events = counted["deferred"]
    copied = Counter[str]()
    for event in events:
        copied[event.what] += event.size * (event.size >= net[0].weight.nbytes)
    assert {*copied.values()} - {0} == ({(1 - share) * everything} if share < 1 else set())
    assert sum(event.kind != "async" for event in events) == 1
    assert launches <= 2 * counted["immediate"][0]


@on_gpu
def test_a_failing_allocation_moves_all_gradients_to_the_host(monkeypatch):
    """Converting 16-bit sums to float32 may fail although the gradients fit."""
    records = records_of(*(torch.nn.Parameter(torch.zeros(100, device="cuda").bfloat16()) for _ in range(3)))
    store, failures = GradientStore(math.inf), iter([torch.OutOfMemoryError("full")])
    for n, record in enumerate(records):
        store.keep(record, torch.full((100,), n + 1.0, device="cuda").bfloat16())
    convert = torch.Tensor.to

    def to(self, *args, **kwargs):
        if error := next(failures, None):
            raise error
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    assert store.get(records[1], wide=True).eq(2.0).all()
    assert store._offloaded.keys() == {*records}
    for record, grad in store.drain(records):
        assert grad.eq(int(record.name[1:]) + 1.0).all()
    store.keep(records[0], torch.ones(100, device="cuda"))  # later gradients go to the host too
    assert records[0] in store._offloaded


@on_gpu
def test_later_gradients_find_the_room_that_backward_has_freed(monkeypatch):
    """Only in the last micro-batch: the next one would need the memory for its activations."""
    for last, expected in ((True, [False, False, True]), (False, [False, False, False])):
        records = records_of(*(torch.nn.Parameter(torch.zeros(100, device="cuda")) for _ in range(3)))
        free = iter([1200, 1300, 2000])
        with_free_memory(monkeypatch, lambda free=free: next(free))
        store = GradientStore(None)
        store.begin(last=last)
        for record in records:
            store.keep(record, torch.ones(100, device="cuda"))
        assert [record in store._here for record in records] == expected
        store.clear()
