"""Steps that are decided before their first update (`two_pass`, `deferred`): what each is, and its interlocks."""

import itertools
import logging
from contextlib import nullcontext

import pytest
import torch
from support.nets import same, weights

import lowmem
from lowmem.errors import StepError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.step.policies import Needs, choose

DECIDED = ("two_pass", "deferred")


class Boom(Exception):
    pass


class Net(torch.nn.Module):
    """Three layers, each [4, 4], with dropout in between: `early` gets its gradient last."""

    def __init__(self):
        super().__init__()
        self.early, self.middle, self.late = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x=None):
        x = torch.ones(2, 4) if x is None else x
        return self.late(self.dropout(self.middle(self.dropout(self.early(x))))).square().sum()


@pytest.fixture
def net():
    return Net()


def make(net, policy, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), **{"rule": "lomo", "lr": 0.1, "policy": policy, **options})


def dies_at(parameter):
    """From here on a backward dies before the gradient of `parameter` is there."""
    return parameter.register_hook(lambda _: (_ for _ in ()).throw(Boom("somewhere in backward")))


# -- which policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "on_cpu", "on_gpu"),
    [
        (Needs(), "immediate", "immediate"),
        (Needs(norm="clip_norm=1.0"), "two_pass", "deferred"),
        (Needs(skip="a loss scale"), "two_pass", "deferred"),
        (Needs(exact_skip="a dynamic loss scale"), "two_pass", "deferred"),
        (Needs(accumulation=True), "deferred", "deferred"),
        (Needs(norm="clip_norm=1.0", accumulation=True), "deferred", "deferred"),
    ],
)
def test_auto_is_the_cheapest_that_is_exact(wish, on_cpu, on_gpu):
    for place, expected in ((True, on_cpu), (False, on_gpu)):
        policy, reason = choose(FusedConfig(), wish, on_cpu=place)
        assert policy == expected
        assert (wish.norm or "") in reason or wish.accumulation


@pytest.mark.parametrize(
    ("settings", "wish", "refused"),
    [
        ({"policy": "immediate"}, Needs(norm="clip_norm=1.0"), True),
        ({"policy": "immediate"}, Needs(skip="a loss scale"), True),
        ({"policy": "immediate"}, Needs(exact_skip="a dynamic loss scale"), False),
        ({"policy": "immediate"}, Needs(accumulation=True), True),
        ({"policy": "two_pass"}, Needs(norm="clip_norm=1.0"), False),
        ({"policy": "two_pass"}, Needs(accumulation=True), True),
        ({"policy": "deferred"}, Needs(norm="clip_norm=1.0", accumulation=True), False),
    ],
)
def test_a_policy_that_was_asked_for_is_taken_or_refused(settings, wish, refused):
    with pytest.raises(UnsupportedError, match="policy") if refused else nullcontext():
        assert choose(FusedConfig(**settings), wish, on_cpu=True)[0] == settings["policy"]


def test_a_store_asks_for_deferred(net):
    assert make(net, "auto", store="host", clip_norm=1.0).policy == "deferred"


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
def test_auto_follows_what_is_asked_later(net, caplog):
    caplog.set_level(logging.INFO, logger="lowmem")
    opt = make(net, "auto", rule="scaled_adam", lr=0.01)
    opt.backward(net())
    assert (opt.policy, caplog.messages) == ("immediate", [])
    opt.param_groups[0]["clipping_scale"] = 2.0
    opt.backward(net())
    assert opt.policy == "two_pass"
    with opt.accumulate():
        opt.backward(net())
    opt.backward(net())
    assert opt.policy == "deferred"
    opt.backward(net())  # and is not changed back
    assert opt.policy == "deferred"
    assert [message.partition(":")[0] for message in caplog.messages] == ["policy two_pass", "policy deferred"]


@pytest.mark.parametrize("policy", ["immediate", "two_pass"])
def test_accumulation_without_a_store_is_refused(net, policy):
    opt = make(net, policy)
    with pytest.raises(UnsupportedError, match=f"'{policy}' cannot accumulate.*'deferred'"), opt.accumulate():
        pytest.fail("refused before anything runs")


# -- two passes --------------------------------------------------------------------------------------------------------


def test_leaves_of_others_get_their_gradient_once(net):
    """An input, or a parameter that another optimizer trains."""
    x, grads = torch.ones(2, 4, requires_grad=True), []
    for ordinary in (True, False):
        x.grad = None
        net.zero_grad()
        torch.manual_seed(3)
        if ordinary:
            net(x).backward()
        else:
            late = [("late", net.late.weight)]
            lowmem.FusedOptimizer(late, rule="lomo", policy="two_pass", clip_norm=1.0).backward(net(x))
        grads.append([x.grad, net.early.weight.grad])
    assert same(*grads)


class Forgetful(torch.autograd.Function):
    """Scales its saved gradient in place, as some fused losses do: right once, wrong when replayed."""

    @staticmethod
    def forward(ctx, x):
        ctx.grad = 2 * x.detach()
        return x.square().sum()

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.grad.mul_(3.0)


def test_a_replay_that_is_another_computation_is_noticed(net):
    opt = make(net, "two_pass", clip_norm=0.5)
    x = torch.ones(2, 4)
    opt.backward(Forgetful.apply(net.early(x)) + 0 * net(x))
    with pytest.raises(StepError, match=r"step 1 is torn: its second pass computed other gradients.*'deferred'"):
        opt.backward(net())
    with pytest.raises(StepError, match="torn"):
        opt.state_dict()
    opt.accept_torn_step()
    opt.backward(net())


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_a_replay_that_differs_a_little_is_noticed(net, loss_scale):
    """A hook in the graph counts its calls: gradients of the second pass are half a per cent larger."""
    opt, calls = make(net, "two_pass", clip_norm=0.5, loss_scale=loss_scale), itertools.count()
    loss = net(torch.randn(8, 4))
    loss.register_hook(lambda grad: grad * (1 + 0.005 * next(calls)))
    opt.backward(loss)
    with pytest.raises(StepError, match="second pass computed other gradients"):
        opt.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_replays_are_not_refused(dtype):
    """Gradients of many sizes, one of them of several tiles, and elements that are all the same: sums of these are
    rounded in one direction. Between them is a bias whose gradient is what rounding leaves of terms that cancel."""
    torch.manual_seed(0)
    wide = torch.nn.Linear(600, 500).to(dtype)
    narrow = torch.nn.Sequential(torch.nn.Linear(6, 70), torch.nn.Dropout(), torch.nn.Linear(70, 6)).to(dtype)
    params = [*wide.named_parameters("wide"), *((f"narrow{n}", p) for n, p in enumerate(narrow.parameters()))]
    shift = torch.nn.Parameter(torch.zeros((), dtype=dtype))
    opt = lowmem.FusedOptimizer([*params, ("shift", shift)], "lomo", lr=1e-6, policy="two_pass", clip_norm=1.0)
    for step in range(200):
        x = torch.randn(8, 6, dtype=dtype) * 10.0 ** (step % 5 - 3)
        logits = narrow(x) + shift
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.zeros(8, dtype=torch.long))
        if step % 20 == 0:
            loss = loss + wide(torch.full((2, 600), 0.3331, dtype=dtype)).sum().float()
        opt.backward(loss)
    assert opt.named_state_dict()["step"] == 200


class InTurn(torch.autograd.Function):
    """Its backwards give gradients to other parameters each time."""

    @staticmethod
    def forward(ctx, turns, late, middle):
        ctx.turns, ctx.params = iter(turns), {"late": late, "middle": middle}
        return late.sum() + middle.sum()

    @staticmethod
    def backward(ctx, grad):
        now = next(ctx.turns)
        return None, *(torch.ones_like(param) if name in now else None for name, param in ctx.params.items())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            ("late", "middle"),
            ("late",),
            r"second pass computed no gradient for 'middle\.weight', but the first pass did",
        ),
        (("late",), ("late", "middle"), r"'middle\.weight' got a gradient in the second pass but not in the first"),
    ],
)
def test_passes_over_other_parameters_are_noticed(net, first, second, said):
    opt = make(net, "two_pass", clip_norm=0.5, batching=False)
    with pytest.raises(StepError, match=said):
        opt.backward(InTurn.apply([first, second], net.late.weight, net.middle.weight))


@pytest.mark.parametrize("in_pass", [1, 2])
def test_a_pass_that_dies(net, in_pass):
    """In the measuring pass nothing is lost; in the second one the step is torn."""
    opt = make(net, "two_pass", clip_norm=0.5, batching=False)
    before, passes = weights(net), itertools.count(1)

    def die(_):
        if next(passes) == in_pass:
            raise Boom("somewhere in backward")

    handle = net.middle.weight.register_hook(die)
    with pytest.raises(Boom):
        opt.backward(net())
    handle.remove()
    net.zero_grad()
    if in_pass == 1:
        assert same(before, weights(net))
        opt.backward(net())
        assert opt.last_step.step == 1
        return
    with pytest.raises(StepError, match="step 1 is torn: its backward ended with Boom after 1 parameter"):
        opt.backward(net())


# -- a factor is of its own step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", DECIDED)
def test_no_factor_of_another_step_is_used(net, policy):
    opt = make(net, policy, clip_norm=1e-3)
    opt.backward(net())
    assert opt.last_step.clip_coef < 0.1
    handle = dies_at(net.early.weight)
    with pytest.raises(Boom):
        opt.backward(1e3 * net())
    handle.remove()
    net.zero_grad()
    opt.backward(1e-6 * net())
    assert opt.last_step.clip_coef == 1.0


def test_a_plain_backward_has_not_been_measured(net):
    opt = make(net, "two_pass", clip_norm=1.0)
    before = weights(net)
    with pytest.raises(StepError, match=r"policy 'two_pass'.*no gradients have been measured.*opt\.backward"):
        net().backward()
    assert same(before, weights(net))
    opt.zero_grad()
    opt.backward(net())


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_nothing_moves_before_the_last_micro_batch(net):
    opt = make(net, "deferred")
    before = weights(net)
    for _ in range(3):
        with opt.accumulate():
            opt.backward(net())
        assert same(before, weights(net))
        assert opt.last_step is None
        with pytest.raises(
            StepError, match=r"cannot save in the middle of step 1: .* but the last backward of the step"
        ):
            opt.state_dict()
    opt.backward(net())
    assert not same(before, weights(net))
    assert opt.named_state_dict()["step"] == opt.last_step.step == 1


def test_loading_forgets_a_step_that_waits(net):
    opt = make(net, "deferred")
    saved = opt.state_dict()
    with opt.accumulate():
        opt.backward(1e3 * net())
    opt.load_state_dict(saved)
    opt.backward(net())
    assert opt.last_step.step == 1
    assert opt.last_step.grad_norm < 1e2


def test_accumulation_inside_accumulation(net):
    opt = make(net, "deferred")
    with opt.accumulate():
        with opt.accumulate():
            opt.backward(net())
        opt.backward(net())
    assert opt.last_step is None
    opt.backward(net())
    assert opt.last_step.step == 1


# -- what is not finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adalomo", "adamw", "adafactor", "lans", "scaled_adam", "torch.optim.AdamW"])
@pytest.mark.parametrize("policy", DECIDED)
def test_a_loss_that_is_nan_is_a_step_that_never_was(net, policy, rule, caplog):
    opt = make(net, policy, rule=rule, lr=0.01)
    opt.backward(net())
    before, saved = weights(net), {n: dict(s) for n, s in opt.named_state_dict()["state"].items()}
    kept = {n: {k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)} for n, s in saved.items()}
    opt.backward(net() * torch.nan)
    assert opt.last_step.skipped
    assert opt.last_step.skipped_params == 3
    after = opt.named_state_dict()
    assert after["step"] == 1
    assert same(before, weights(net))
    for name, states in kept.items():
        assert same(states.values(), [after["state"][name][key] for key in states])
    assert "step 2 was skipped" in caplog.text
    assert "the loss is not finite either" in caplog.text
    opt.backward(net())
    assert (opt.last_step.step, opt.nonfinite_steps, opt.nonfinite_gradients) == (2, 1, 3)


def test_a_loss_that_is_nan_under_immediate_is_told(net, caplog):
    opt = make(net, "immediate", rule="adalomo")
    before = weights(net)
    for _ in range(2):
        opt.backward(net() * torch.nan)
    opt.backward(net() * 0.0)
    assert same(before, weights(net))
    warned = [record.levelname for record in caplog.records if "not finite" in record.message]
    assert warned == ["WARNING"]  # once
    assert opt.nonfinite_steps == 2
