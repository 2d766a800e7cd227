"""The gradient store hands back what it was given, and sums of micro-batches are those of `.grad`."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.devices import seeded

import lowmem
from lowmem.options import FusedConfig
from lowmem.rules import Lomo, ParamSpec, StateSpec, UpdateRule
from lowmem.step import policies
from lowmem.step.offload import GradientStore, powers_of_two
from lowmem.step.record import ParamRecord
from lowmem.tiles.layout import Span, View

# A store on the host is made for a device that is not the host; here it copies from memory to memory, without streams.
KINDS = pytest.mark.parametrize("kind", ["resident", "host"])


@pytest.fixture
def stores(monkeypatch):
    """A function: optimizers that are made from then on wait in a store of that kind. Returns the stores they made."""

    def use(kind):
        made = []

        def make(**_):
            made.append(GradientStore(host=kind == "host"))
            return made[-1]

        monkeypatch.setattr(policies, "GradientStore", make)
        return made

    return use


def slots_of(*params):
    return {
        param: ParamRecord(f"p{n}", param, Span(tuple(param.shape), 0, param.numel(), param.numel()), {}, Lomo())
        for n, param in enumerate(params)
    }


def same(one, other):
    """Bits, layout in memory and dtype."""
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


# -- what is kept ------------------------------------------------------------------------------------------------------

GRADIENTS = {
    "a number": lambda: torch.randn(()),
    "a vector": lambda: torch.randn(1025),
    "a matrix": lambda: torch.randn(3, 7),
    "transposed": lambda: torch.randn(6, 5).t(),
    "permuted": lambda: torch.randn(4, 3, 5).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "not finite": lambda: torch.tensor([[float("inf"), -float("inf")], [0.0, -0.0]]),
}


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_comes_back(kind, dtype):
    """Bit for bit, each lying as it lay, beside others of every size, step after step."""
    for step in range(3):
        torch.manual_seed(step)
        grads = [make_gradient().to(dtype) for make_gradient in GRADIENTS.values()]
        if step == 0:
            records = slots_of(*(torch.nn.Parameter(torch.empty_like(grad)) for grad in grads))
            store = GradientStore(host=kind == "host")
        for record, grad in reversed(list(zip(records.values(), grads, strict=True))):
            store.keep(record, grad.clone())
        store.begin(0)
        assert all(same(store.get(record), grad) for record, grad in zip(records.values(), grads, strict=True))
        drained = list(store.drain(records.values()))
        assert [record.name for record, _ in drained] == [record.name for record in records.values()]
        assert all(same(found, grad) for (_, found), grad in zip(drained, grads, strict=True))
        assert all(store.get(record) is None for record in records.values())


@KINDS
def test_a_gradient_that_lies_otherwise_in_the_next_step(kind):
    """As after its parameter was made contiguous: rules see the gradient in the parameter's own layout."""
    records = slots_of(torch.nn.Parameter(torch.zeros(4, 6)))
    (record,) = records.values()
    store = GradientStore(host=kind == "host")
    for grad in (torch.randn(6, 4).t(), torch.randn(4, 6), torch.randn(6, 4).t()):
        store.keep(record, grad.clone())
        ((_, found),) = store.drain([record])
        assert same(found, grad)


@KINDS
def test_what_was_handed_back_stays(kind):
    """What comes for one parameter while another is applied does not write over it."""
    records = slots_of(*(torch.nn.Parameter(torch.zeros(5)) for _ in range(3)))
    store = GradientStore(host=kind == "host")
    for n, record in enumerate(records.values()):
        store.keep(record, torch.full((5,), float(n)))
    handed = []
    for record, grad in store.drain(records.values()):
        handed.append(grad)
        assert [each[0].item() for each in handed] == list(range(len(handed)))
        assert store.get(record) is None


# -- sums of micro-batches ---------------------------------------------------------------------------------------------


def seen(t):
    return {"seen": t.grad}


class Witness(UpdateRule):
    """A rule that moves nothing, and keeps the gradient as rules see it: in float32, unrounded."""

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


def micro_batches(count, shapes, dtype, seed=0):
    """Gradients of each parameter in each micro-batch, None where it has none: all, the first alone, the last alone."""
    source = seeded(seed)
    drawn = [[torch.randn(shape, generator=source).to(dtype) for shape in shapes] for _ in range(count)]
    for n, grads in enumerate(drawn):
        grads[1] = grads[1] if n == 0 else None
        grads[2] = grads[2] if n == count - 1 else None
    return drawn


def loss_of(params, grads):
    """A loss whose gradients are just those given."""
    pairs = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
    return torch.stack([(param * grad).sum().float() for param, grad in pairs]).sum()


def give_step(opt, params, steps):
    for n, grads in enumerate(steps, start=1):
        with opt.accumulate() if n < len(steps) else nullcontext():
            opt.backward(loss_of(params, grads))


def as_torch_sums(params, steps):
    """`.grad` of parameters like these, after the backwards of all micro-batches."""
    own = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for grads in steps:
        loss_of(own, grads).backward()
    return [param.grad for param in own]


SHAPES = [(3, 4), (5,), (2, 3, 2), (), (20_000,)]


@KINDS
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    ("dtype", "sums"),
    [("float32", "float32"), ("float32", "gradient"), ("bfloat16", "gradient"), ("float16", "gradient")],
)
def test_sums_are_those_of_grad(kind, dtype, sums, count, stores):
    """Bit for bit, and a step's sums leave nothing to the next."""
    made, dtype = stores(kind), getattr(torch, dtype)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    opt = lowmem.FusedOptimizer(params, rule=Witness(), policy="deferred", accumulation_dtype=sums)
    for step in range(3):
        steps = micro_batches(count, SHAPES, dtype, seed=step)
        give_step(opt, params, steps)
        for param, want in zip(params, as_torch_sums(params, steps), strict=True):
            assert torch.equal(opt.state[param]["seen"], want.float())
    assert len(made) == 1  # and it is the store that was asked for


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_sums_of_narrow_gradients(kind, dtype, stores):
    """Seven numbers, six roundings of at most 2⁻²⁴ of what has been summed so far; `.grad` is off by far more."""
    stores(kind)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    opt = lowmem.FusedOptimizer(params, rule=Witness(), policy="deferred", accumulation_dtype="float32")
    steps = micro_batches(7, SHAPES, dtype)
    give_step(opt, params, steps)
    for n, (param, rounded) in enumerate(zip(params, as_torch_sums(params, steps), strict=True)):
        given = [grads[n].double().cpu().numpy() for grads in steps if grads[n] is not None]
        exact, size = np.sum(given, axis=0), np.sum(np.abs(given), axis=0)
        allowed = 6 * 2.0**-24 * size
        found = opt.state[param]["seen"].double().cpu().numpy()
        assert (np.abs(found - exact) <= allowed).all()
        if len(given) > 1 and param.numel() > 1:
            assert (np.abs(rounded.double().cpu().numpy() - exact) > allowed).any()


@pytest.mark.parametrize(
    ("sums", "count", "want"),
    [
        ("float32", 1, ["bfloat16"]),  # a single one is stored as it is, and so is the first of several
        ("float32", 3, ["bfloat16", "float32", "float32"]),
        ("gradient", 1, ["bfloat16"]),
        ("gradient", 3, ["bfloat16"] * 3),
    ],
)
def test_what_gradients_wait_in(sums, count, want, monkeypatch):
    kept = []

    class Noting(GradientStore):
        def keep(self, record, grad):
            kept.append(str(grad.dtype).removeprefix("torch."))
            super().keep(record, grad)

    monkeypatch.setattr(policies, "GradientStore", lambda **_: Noting(host=False))
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    opt = lowmem.FusedOptimizer([param], rule="lomo", policy="deferred", accumulation_dtype=sums)
    give_step(opt, [param], [[torch.ones(4, dtype=torch.bfloat16)]] * count)
    assert kept == want


@KINDS
def test_a_backward_that_dies_leaves_nothing(kind, stores):
    """Nor do the micro-batches before it; the step begins again, and is right."""
    stores(kind)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    opt = lowmem.FusedOptimizer(params, rule=Witness(), policy="deferred")
    steps = micro_batches(3, SHAPES, torch.float32)
    give_step(opt, params, steps)  # the store has been used before

    def boom(_):
        raise RuntimeError("somewhere in backward")

    with opt.accumulate():
        opt.backward(loss_of(params, steps[0]))
    spoilt = params[0].register_hook(boom)
    with pytest.raises(RuntimeError, match="somewhere") as died:
        opt.backward(loss_of(params, [grad if n in (0, 4) else None for n, grad in enumerate(steps[1])]))
    assert "the 1 micro-batch(es) before it were dropped too" in died.value.__notes__[0]
    spoilt.remove()
    opt.state_dict()  # no step is torn, and none waits
    assert opt.last_step.step == opt.named_state_dict()["step"] == 1
    fresh = micro_batches(2, SHAPES, torch.float32, seed=9)
    give_step(opt, params, fresh)
    for param, want in zip(params, as_torch_sums(params, fresh), strict=True):
        assert torch.equal(opt.state[param]["seen"], want)


@KINDS
def test_micro_batches_that_are_given_up(kind, stores):
    """A user who goes on with the weights as they are begins the step anew."""
    stores(kind)
    param = torch.nn.Parameter(torch.zeros(3))
    opt = lowmem.FusedOptimizer([param], rule=Witness(), policy="deferred")
    with opt.accumulate():
        opt.backward(param.sum())
    opt.accept_torn_step()
    opt.backward(2 * param.sum())
    assert (opt.state[param]["seen"] == 2).all()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last(kind, dtype, stores):
    """What lies otherwise in memory is summed and measured element by element all the same."""
    stores(kind)
    shape = (2, 3, 4, 5)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last))
    opt = lowmem.FusedOptimizer(
        [param], rule=Witness(), policy="deferred", clip_norm=1e9, accumulation_dtype="gradient"
    )
    steps = [[torch.randn(shape).to(dtype)], [torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)]]
    give_step(opt, [param], steps)
    (want,) = as_torch_sums([param], steps)
    assert want.stride() == param.stride() != torch.zeros(shape).stride()
    assert torch.equal(opt.state[param]["seen"], want.float())
    assert opt.last_step.grad_norm.item() == pytest.approx(np.linalg.norm(want.double().cpu().numpy()), rel=1e-6)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a gradient has the dtype of its parameter")
@KINDS
def test_a_gradient_wider_than_its_parameter(kind, stores):
    """As torch allows by `grad_dtype`: it has room of its own, too."""
    stores(kind)
    params = [torch.nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16)) for _ in range(2)]
    params[0].grad_dtype = torch.float32
    opt = lowmem.FusedOptimizer(params, rule=Witness(), policy="deferred", accumulation_dtype="gradient")
    opt.backward((params[1].float() * 3).sum() + (params[0].float() * 2).sum())
    assert [opt.state[param]["seen"].unique().tolist() for param in params] == [[2.0], [3.0]]


# -- in pinned memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [1, 2, 3, 255, 257, 8_192, 4096 * 14336 * 2, 128256 * 4096 * 2, 151936 * 4096 * 4, (1 << 30) + 1]
)
def test_pinned_memory_is_not_rounded(size):
    """torch rounds each allocation up to a power of two."""
    sizes = powers_of_two(size)
    assert all(each & (each - 1) == 0 for each in sizes)
    assert size <= sum(sizes) <= size * 1.01 + 1
    assert len(sizes) <= 8


@pytest.mark.cpu_only("pinned memory is in several pieces")
def test_room_is_made_once_for_sums():
    """A first micro-batch of 16-bit gradients has room for the float32 sum that replaces it."""
    records = slots_of(torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)))
    (record,) = records.values()
    store = GradientStore(host=True)
    store.begin(least=4)
    store.keep(record, torch.ones(1000, dtype=torch.bfloat16))
    (first,) = store._room[record.name]
    store.keep(record, torch.ones(1000))
    (second,) = store._room[record.name]
    assert first is second
    assert second.nbytes == 4000


def test_a_rank_that_holds_nothing_of_a_parameter_stores_nothing():
    (record,) = slots_of(torch.nn.Parameter(torch.zeros(0))).values()
    store = GradientStore(host=True)
    store.keep(record, torch.ones(0))
    assert [grad.numel() for _, grad in store.drain([record])] == [0]


# -- which one it is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "on_cpu", "elsewhere"),
    [("host", False, True), ("device", False, False)],
)
def test_which_store_is_made(kind, on_cpu, elsewhere):
    """On a CPU host and device are one memory, and nothing is copied."""
    config = FusedConfig(store=kind)
    for device, made in (("cpu", on_cpu), ("meta", elsewhere)):
        records = slots_of(torch.nn.Parameter(torch.zeros(3, device=device)))
        parameters, updates = (
            SimpleNamespace(config=config, records=records),
            SimpleNamespace(clipping=None, cycle=None),
        )
        policy = policies.Deferred(parameters, updates, reason="")
        assert policy._store.host is made
