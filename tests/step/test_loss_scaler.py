"""The loss scale is `torch.amp.GradScaler`'s, step by step; an overflow leaves out what it must and nothing else.

The ordinary side is PyTorch's own: a `GradScaler` around `torch.optim.SGD` and `torch.optim.AdamW(foreach=False)`.
"""

import copy
import math
import random
from contextlib import nullcontext

import pytest
import torch
from support.compiled import equal
from support.devices import seeded
from support.nets import weights
from torch.nn import functional

import lowmem
from lowmem.errors import CheckpointError, ConfigError, StepError
from lowmem.options import DynamicScale, FusedConfig
from lowmem.step.loss_scaler import LossScaler

CPU = torch.device("cpu")


def made(**rule):
    return LossScaler(DynamicScale(**rule), CPU)


def learn(scale, overflow):
    scale.update(torch.tensor(not overflow))
    return float(scale.value)


def pattern(steps, share, seed=0):
    """Which steps overflow: about `share` of them."""
    source = random.Random(seed)
    return [source.random() < share for _ in range(steps)]


# -- the rule of a dynamic scale ---------------------------------------------------------------------------------------


class Scaler:
    """`GradScaler` on an optimizer of one parameter, driven by whether its gradient is finite."""

    def __init__(self, init, growth, backoff, interval):
        self.scaler = torch.amp.GradScaler("cpu", init, growth, backoff, interval)
        self.param = torch.nn.Parameter(torch.zeros(1))
        self.sgd = torch.optim.SGD([self.param], lr=0.0)
        self.scaler.scale(torch.ones(()))

    def learn(self, overflow):
        self.param.grad = torch.full((1,), math.inf if overflow else 1.0)
        self.scaler.step(self.sgd)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 0.8])
@pytest.mark.parametrize(
    ("init", "growth", "backoff", "interval"),
    [
        (65536.0, 2.0, 0.5, 5),
        (1.0, 4.0, 0.25, 1),
        (1024.0, 1.5, 0.75, 2),
        (1000.0, 1.1, 0.9, 3),  # numbers that float32 does not hold: GradScaler multiplies with them in float64
        (300.0, 1.001, 0.7, 1),
        (2.0**125, 2.0, 0.5, 1),  # near the largest float32, which growth stops short of
    ],
)
def test_as_grad_scaler(init, growth, backoff, interval, share):
    ours = made(
        init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval, min_scale=1e-30
    )
    theirs = Scaler(init, growth, backoff, interval)
    for overflow in pattern(300, share):
        if theirs.scaler.get_scale() > 1e-20:  # GradScaler's knows no least
            assert learn(ours, overflow) == theirs.learn(overflow)


def test_the_default_is_grad_scalers():
    ours, theirs = LossScaler("dynamic", CPU), torch.amp.GradScaler("cpu").state_dict()
    rule = ours._dynamic
    assert (rule.growth_factor, rule.backoff_factor, rule.growth_interval) == tuple(
        theirs[name] for name in ("growth_factor", "backoff_factor", "growth_interval")
    )
    assert float(ours.value) == theirs["scale"]


class Megatron:
    """The rule of Megatron's `DynamicGradScaler.update`, in Python's numbers."""

    def __init__(self, init, growth, backoff, interval, least, hysteresis):
        self.scale, self.least, self.growth, self.backoff = init, least, growth, backoff
        self.interval, self.hysteresis = interval, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def learn(self, found_inf):
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff, self.least)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * self.growth
        return self.scale


@pytest.mark.parametrize("share", [0.02, 0.2, 0.6])
@pytest.mark.parametrize("hysteresis", [1, 2, 5])
@pytest.mark.parametrize("interval", [1, 4])
def test_hysteresis_as_megatron(interval, hysteresis, share):
    """Powers of two, so that Python's float64 and our float32 hold the same; a share that balances the interval."""
    ours = made(
        init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=interval, min_scale=4.0,
        hysteresis=hysteresis,
    )  # fmt: skip
    theirs = Megatron(2.0**16, 2.0, 0.5, interval, 4.0, hysteresis)
    for overflow in pattern(300, share):
        if theirs.scale < 2.0**100:  # Megatron's knows no end
            assert learn(ours, overflow) == theirs.learn(overflow)


def test_never_below_least():
    scale = made(init_scale=100.0, backoff_factor=0.5, min_scale=30.0)
    assert not scale.at_minimum()
    assert [learn(scale, True) for _ in range(3)] == [50.0, 30.0, 30.0]
    assert scale.at_minimum()
    assert float(made(init_scale=1.0, growth_interval=1).value) == 1.0
    assert made(init_scale=1.0, growth_interval=1).at_minimum()


@pytest.mark.parametrize("init", [2.0**127, 3e38])
def test_never_infinite(init):
    scale = made(init_scale=init, growth_factor=2.0, growth_interval=1)
    for _ in range(5):
        assert learn(scale, False) == torch.tensor(init).item()
    assert learn(scale, True) == torch.tensor(init).item() / 2


def test_memory_is_not_given_back():
    """Another stream may still read it: the scale changes in place."""
    scale = made(init_scale=8.0, growth_interval=1)
    before, inverse = scale.value, scale.inverse(CPU)
    learn(scale, True)
    assert scale.value is before
    assert scale.inverse(CPU) is inverse
    assert (before.item(), inverse.item()) == (4.0, 0.25)


@pytest.mark.parametrize("wanted", [3.0, 1000.0, 65536.0, 7])
def test_the_inverse_is_grad_scalers(wanted):
    """The reciprocal in float64, rounded once."""
    scale = LossScaler(wanted, CPU)
    want = torch.tensor(float(wanted)).double().reciprocal().float()
    assert torch.equal(scale.inverse(CPU), want)
    assert scale.inverse(CPU).dtype == torch.float32


@pytest.mark.parametrize("overflow", [False, True])
def test_a_fixed_scale_stays(overflow):
    scale = LossScaler(1000, CPU)
    scale.update(torch.tensor(not overflow))
    assert (float(scale.value), float(scale.scaled(torch.tensor(2.0)))) == (1000.0, 2000.0)
    assert (scale.dynamic, scale.at_minimum(), scale.state_dict()) == (False, None, None)


@pytest.mark.parametrize("wanted", [None, 0, 1, 1.0])
def test_no_scale(wanted):
    scale = LossScaler(wanted, CPU)
    loss = torch.tensor(3.0)
    scale.update(torch.tensor(False))
    assert (scale.value, scale.inverse(CPU), scale.dynamic, scale.at_minimum()) == (None, None, False, None)
    assert scale.scaled(loss) is loss


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("init_scale", [0.5, 1e39, math.inf, math.nan, "2", None], "(at least min_scale|a number > 0)"),
        ("growth_factor", [1.0, 0.5, math.inf, math.nan, "2"], "a number > 1"),
        ("backoff_factor", [0.0, 1.0, -0.5, math.nan, None], "a number > 0 and < 1"),
        ("growth_interval", [0, -1, 1.5, math.nan, math.inf, "2"], "a whole number >= 1"),
        ("min_scale", [0.0, -1.0, math.inf, math.nan, "1"], "a number > 0"),
        ("hysteresis", [0, 1.5, math.nan, math.inf, None], "a whole number >= 1"),
    ],
)
def test_a_value_out_of_range(field, wrong, message):
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"loss_scale\.{field}=.* allowed: {message}"):
            DynamicScale(**{field: value})


@pytest.mark.parametrize("wanted", [-1, math.inf, math.nan, True, False, "big", "", [2.0], 1e39, 1e-46])
def test_what_is_no_scale(wanted):
    with pytest.raises(ConfigError, match=r"loss_scale="):
        FusedConfig(loss_scale=wanted)


def test_saved_in_the_middle():
    """Every step of a pattern is a place to be saved in: trackers as well as the scale continue."""
    options = {"init_scale": 256.0, "growth_interval": 4, "hysteresis": 3, "min_scale": 2.0}
    nonfinite_steps = pattern(60, 0.3)
    whole = made(**options)
    for done, overflow in enumerate(nonfinite_steps):
        learn(whole, overflow)
        resumed, went_on = made(**options), copy.deepcopy(whole)
        resumed.load_state_dict(whole.state_dict())
        later = nonfinite_steps[done + 1 :]
        assert [learn(resumed, each) for each in later] == [learn(went_on, each) for each in later]


def test_saved_beyond_the_interval():
    """Resumed with a shorter interval than has gone by, it grows at the next step, and not never."""
    saved = made(init_scale=8.0, growth_interval=100)
    for _ in range(50):
        learn(saved, False)
    resumed = made(init_scale=8.0, growth_interval=10)
    resumed.load_state_dict(saved.state_dict())
    assert [learn(resumed, False) for _ in range(12)] == [16.0] * 10 + [32.0] * 2


def test_saved_without_a_scale():
    """A run that had no dynamic scale says nothing to one that has; and one that has none takes none."""
    scale = made(init_scale=64.0)
    scale.load_state_dict(LossScaler(8, CPU).state_dict())
    assert float(scale.value) == 64.0
    fixed = LossScaler(8, CPU)
    fixed.load_state_dict(scale.state_dict())
    assert float(fixed.value) == 8.0


def test_a_loaded_scale_is_divided_by():
    scale = made(init_scale=64.0)
    scale.inverse(CPU)
    scale.load_state_dict(made(init_scale=8.0).state_dict())
    assert float(scale.inverse(CPU)) == 1 / 8


@pytest.mark.parametrize("missing", ["scale", "good", "patience"])
def test_saved_incompletely(missing):
    saved = made().state_dict()
    del saved[missing]
    with pytest.raises(CheckpointError, match=f"the saved loss scale has {missing}=None"):
        made().check_saved(saved)


# -- training with overflows --------------------------------------------------------------------------------------

STEPS = 14
SCALE = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}

# step → (micro-batch or the last one, layer, what the layer's gradient is multiplied with). Two in a row, one after a
# growth; the layer whose gradient comes first, the one whose gradient comes last, and one in between.
OVERFLOWS = {2: (0, "2", math.inf), 3: (3, "0", math.nan), 7: (1, "1", -math.inf), 12: (2, "0", math.inf)}


class Net(torch.nn.Module):
    """Three layers with biases; a gradient is spoilt where `OVERFLOWS` says so."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in ((6, 8), (8, 8), (8, 5))).to(dtype)
        self.now = (-1, -1)  # step, micro-batch
        self.micro_batches = 1
        for n, layer in enumerate(self.layers):
            layer.weight.register_hook(lambda grad, n=str(n): self.spoilt(grad, n))

    def spoilt(self, grad, layer):
        step, micro = self.now
        at, where, factor = OVERFLOWS.get(step, (0, None, 1.0))
        hit = where == layer and micro == min(at, self.micro_batches - 1)
        return grad * factor if hit else grad

    def forward(self, x):
        first, second, third = self.layers
        return third(torch.tanh(second(functional.gelu(first(x)))))


def losses(net, step, accumulation, autocast):
    """The losses of a step's micro-batches, one after the other."""
    net.micro_batches = accumulation
    source = seeded(step)
    for micro in range(accumulation):
        net.now = (step, micro)
        x, y = torch.randn(4, 6, generator=source), torch.randint(5, (4,), generator=source)
        with torch.autocast("cpu", dtype=torch.float16) if autocast else nullcontext():
            out = net(x.to(net.layers[0].weight.dtype))
        yield functional.cross_entropy(out.float(), y) / accumulation


def optimizer_of(rule, params):
    if rule == "lomo":
        return torch.optim.SGD(params, lr=0.05)
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.01, foreach=False)


def fused_on(net, rule, **options):
    hyper = {"weight_decay": 0.01} if rule == "adamw" else {}
    options = {"loss_scale": DynamicScale(**SCALE), "rounding": "nearest", **options}
    return lowmem.FusedOptimizer(net.named_parameters(), rule=rule, lr=0.05, **hyper, **options)


def train_fused_step(opt, net, step, accumulation=1, autocast=False):
    for n, loss in enumerate(losses(net, step, accumulation, autocast), start=1):
        with opt.accumulate() if n < accumulation else nullcontext():
            opt.backward(loss)


class Ordinary:
    """PyTorch's own loop. float16 weights have float32 shadows that are stepped in their place: `GradScaler` refuses
    gradients in float16, and the shadow is what a rule makes of a stored weight.
    """

    def __init__(self, net, rule, autocast):
        self.net, self.autocast = net, autocast
        self.shadows = [torch.nn.Parameter(param.detach().float()) for param in net.parameters()]
        self.optimizer = optimizer_of(rule, self.shadows)
        self.scaler = torch.amp.GradScaler(
            "cpu",
            SCALE["init_scale"],
            SCALE["growth_factor"],
            SCALE["backoff_factor"],
            growth_interval=SCALE["growth_interval"],
        )

    def backward(self, step, accumulation):
        for loss in losses(self.net, step, accumulation, self.autocast):
            self.scaler.scale(loss).backward()
            for shadow, param in zip(self.shadows, self.net.parameters(), strict=True):
                shadow.grad = param.grad.float() if shadow.grad is None else shadow.grad + param.grad
                param.grad = None

    @torch.no_grad()
    def finish(self):
        self.scaler.update()
        self.optimizer.zero_grad()
        for shadow, param in zip(self.shadows, self.net.parameters(), strict=True):
            shadow.copy_(param.copy_(shadow))  # as it is stored

    def step(self, step, accumulation):
        self.backward(step, accumulation)
        self.scaler.step(self.optimizer)
        self.finish()


KINDS = {"autocast": (torch.float32, True), "float16": (torch.float16, False), "float32": (torch.float32, False)}


@pytest.mark.parametrize(("policy", "accumulation"), [("two_pass", 1), ("deferred", 1), ("deferred", 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["lomo", "adamw"])
def test_whole_steps_are_left_out_as_by_grad_scaler(rule, kind, policy, accumulation):
    dtype, autocast = KINDS[kind]
    ordinary, net = Net(dtype), Net(dtype)
    theirs = Ordinary(ordinary, rule, autocast)
    opt = fused_on(net, rule, policy=policy)
    left_out = 0
    for step in range(STEPS):
        before = weights(net)
        theirs.step(step, accumulation)
        train_fused_step(opt, net, step, accumulation, autocast)
        assert opt.loss_scale == theirs.scaler.get_scale()
        assert all(map(equal, weights(net), weights(ordinary)))
        assert opt.last_step.skipped == (step in OVERFLOWS)
        assert all(map(torch.equal, weights(net), before)) == (step in OVERFLOWS)
        left_out += step in OVERFLOWS
        assert opt.named_state_dict()["step"] == step + 1 - left_out
    assert opt.nonfinite_steps == len(OVERFLOWS)
    assert opt.last_step.step == STEPS - len(OVERFLOWS)


@pytest.mark.parametrize("policy", ["two_pass", "deferred"])
def test_what_the_report_says_of_a_step_that_was_left_out(policy):
    net = Net()
    opt = fused_on(net, "lomo", policy=policy)
    train_fused_step(opt, net, 2)
    last = opt.last_step
    assert (last.skipped, last.nonfinite, last.skipped_params) == (True, ["layers.2.weight"], 6)
    assert (last.loss_scale, opt.loss_scale) == (1024.0, 512.0)  # what it was made with; what comes next
    assert (opt.nonfinite_steps, opt.nonfinite_gradients) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_immediate_leaves_out_the_spoilt_parameters_alone(kind):
    """The scale backs off like `GradScaler`'s; whatever has a finite gradient moves as if nothing had been."""
    dtype, autocast = KINDS[kind]
    ordinary, net = Net(dtype), Net(dtype)
    theirs, opt = Ordinary(ordinary, "lomo", autocast), fused_on(net, "lomo", policy="immediate")
    for step in range(STEPS):
        before = weights(net)
        theirs.backward(step, 1)
        theirs.scaler.unscale_(theirs.optimizer)
        for shadow in theirs.shadows:
            if not shadow.grad.isfinite().all():
                shadow.grad = None
        theirs.optimizer.step()
        theirs.finish()
        train_fused_step(opt, net, step, autocast=autocast)
        assert opt.loss_scale == theirs.scaler.get_scale()
        assert all(map(torch.equal, weights(net), weights(ordinary)))
        spoilt = [f"layers.{OVERFLOWS[step][1]}.weight"] if step in OVERFLOWS else []
        stayed = [name for (name, p), old in zip(net.named_parameters(), before, strict=True) if torch.equal(p, old)]
        assert opt.last_step.nonfinite == stayed == spoilt
        assert (opt.last_step.skipped_params, opt.last_step.skipped) == (len(spoilt), False)
    assert (opt.nonfinite_steps, opt.nonfinite_gradients) == (len(OVERFLOWS), len(OVERFLOWS))
    assert opt.named_state_dict()["step"] == STEPS  # a step that was taken in part counts


def test_gradients_and_steps_are_counted_apart(give_gradients):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    opt = lowmem.FusedOptimizer(params, rule="lomo", policy="deferred", loss_scale="dynamic")
    for spoilt in (2, 0, 3):
        grads = [torch.full((2,), math.inf if n < spoilt else 1.0) for n in range(3)]
        give_gradients(opt, *zip(params, grads, strict=True))
    assert (opt.nonfinite_steps, opt.nonfinite_gradients) == (2, 5)


@pytest.mark.parametrize("loss_scale", [None, 1000.0, "dynamic"])
@pytest.mark.parametrize("policy", ["immediate", "two_pass", "deferred"])
def test_the_loss_comes_back_unscaled(policy, loss_scale):
    net = Net()
    opt = fused_on(net, "lomo", policy=policy, loss_scale=loss_scale)
    (loss,) = losses(net, 0, 1, False)
    assert torch.equal(opt.backward(loss), loss.detach())


# -- an overflow that no scale can help --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["immediate", "two_pass", "deferred"])
@pytest.mark.troubleshooting("the loss scale cannot back off")
def test_an_overflow_at_the_least_scale_raises_at_the_next_backward(policy):
    net = Net()
    opt = fused_on(net, "lomo", policy=policy, loss_scale=DynamicScale(init_scale=4.0, min_scale=2.0))
    train_fused_step(opt, net, 0)
    train_fused_step(opt, net, 2)  # backs off to the least
    train_fused_step(opt, net, 3)
    before = weights(net)
    with pytest.raises(StepError, match=r"'layers\.0\.weight' is not finite.*cannot back off below"):
        train_fused_step(opt, net, 4)
    assert all(map(torch.equal, weights(net), before))
    train_fused_step(opt, net, 4)  # told once; who goes on knows what they do
    assert not any(map(torch.equal, weights(net), before))


def test_a_fixed_scale_is_never_hopeless():
    """There the overflow is reported, and no scale was going to help it."""
    net = Net()
    opt = fused_on(net, "lomo", policy="deferred", loss_scale=1024)
    for step in (2, 3, 4):
        train_fused_step(opt, net, step)
    assert (opt.nonfinite_steps, opt.loss_scale, opt.last_step.skipped) == (2, 1024.0, False)


# -- saving and resuming -----------------------------------------------------------------------------------------------


def test_loading_forgets_an_overflow_that_nobody_was_told_of():
    """The report of a step that is gone belongs to no step any more."""
    net = Net()
    opt = fused_on(net, "lomo", policy="deferred", loss_scale=DynamicScale(init_scale=2.0, min_scale=2.0))
    train_fused_step(opt, net, 0)
    saved = copy.deepcopy(opt.state_dict())
    train_fused_step(opt, net, 2)
    opt.load_state_dict(saved)
    train_fused_step(opt, net, 4)
    assert opt.named_state_dict()["step"] == 2
