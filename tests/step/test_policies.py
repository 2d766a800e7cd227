"""Tests when updates happen, how steps begin and end, and errors for loops that would change ordinary training."""

import itertools
import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.nets import plain_step, same, weights
from support.troubleshooting import explained
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowmem
from lowmem.errors import StepError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.step.policies import Needs, choose


class Boom(Exception):
    pass


def boom(_):
    raise Boom("somewhere in backward")


class Net(torch.nn.Module):
    """Three layers, each [4, 4]. `early` gets its gradient last."""

    def __init__(self):
        super().__init__()
        self.early, self.middle, self.late = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x=None, *, reentrant=None):
        """Returns the loss. `reentrant` checkpoints `middle`."""
        x = torch.ones(2, 4, device=self.early.weight.device) if x is None else x
        x = self.dropout(self.early(x))
        x = self.middle(x) if reentrant is None else checkpoint(self.middle, x, use_reentrant=reentrant)
        return self.late(x).square().sum()


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def opt(net):
    return make(net, "auto", batching=False)


def make(net, policy, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), **{"rule": "lomo", "lr": 0.01, "policy": policy, **options})


def moved(net, before):
    return [not torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True)]


def backward(opt, loss, plain):
    loss.backward() if plain else opt.backward(loss)


PLAIN = pytest.mark.parametrize("plain", [False, True])


# -- the policy --------------------------------------------------------------------------------------------------------

NORM, SKIP = Needs(norm="clip_norm=1.0"), Needs(skip="a loss scale")
EXACT_SKIP, ACCUMULATION = Needs(exact_skip="a dynamic loss scale"), Needs(accumulation=True)


@pytest.mark.parametrize(
    ("needs", "on_cpu", "on_gpu", "impossible"),
    [
        (Needs(), "immediate", "immediate", ()),
        (NORM, "two_pass", "deferred", ("immediate",)),
        (SKIP, "two_pass", "deferred", ("immediate",)),
        (EXACT_SKIP, "two_pass", "deferred", ()),
        (ACCUMULATION, "deferred", "deferred", ("immediate", "two_pass")),
        (Needs(norm="clip_norm=1.0", accumulation=True), "deferred", "deferred", ("immediate", "two_pass")),
    ],
)
def test_auto_is_the_cheapest_exact_policy_and_a_requested_one_is_used_or_raises(needs, on_cpu, on_gpu, impossible):
    for place, expected in ((True, on_cpu), (False, on_gpu)):
        policy, reason = choose(FusedConfig(), needs, on_cpu=place)
        assert policy == expected
        assert (needs.norm or "") in reason or needs.accumulation
    for policy in ("immediate", "two_pass", "deferred"):
        with pytest.raises(UnsupportedError, match="policy") if policy in impossible else nullcontext():
            assert choose(FusedConfig(policy=policy), needs, on_cpu=True)[0] == policy


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
def test_auto_follows_later_requests(net, caplog):
    caplog.set_level(logging.INFO, logger="lowmem")
    opt = make(net, "auto", rule="scaled_adam")
    opt.backward(net())
    assert (opt.policy, caplog.messages) == ("immediate", [])
    opt.param_groups[0]["clipping_scale"] = 2.0
    opt.backward(net())
    assert opt.policy == "two_pass" and "clipping_scale=2.0" in opt.policy_reason
    opt.param_groups[0]["clipping_scale"] = 3.0
    opt.backward(net())
    assert opt.policy == "two_pass" and "clipping_scale=3.0" in opt.policy_reason
    with opt.accumulate():
        opt.backward(net())
    opt.backward(net())
    assert opt.policy == "deferred"
    opt.backward(net())  # the policy never changes back
    assert opt.policy == "deferred"
    assert [message.partition(":")[0] for message in caplog.messages] == ["policy two_pass", "policy deferred"]
    assert make(Net(), "auto", store="host", clip_norm=1.0).policy == "deferred"


# -- losses and gradients that cannot make a step ----------------------------------------------------------------------


def leftover(net):
    net.middle.weight.grad = torch.ones(4, 4)
    return net()


UNUSABLE = [
    (lambda net: net.late(torch.ones(2, 4)), r"\[2, 4\]; it must be"),
    (lambda net: lambda: 3.0, "the loss is a float; it must be"),
    explained("the loss has no graph", lambda net: net().detach(), "the loss has"),
    explained("no parameter of this optimizer", lambda net: torch.ones((), requires_grad=True) * 2, "got a gradient"),
    (leftover, r"'middle\.weight' already has a gradient in"),
]


@pytest.mark.parametrize(("loss", "message"), UNUSABLE)
def test_a_loss_without_a_graph_raises(net, opt, loss, message):
    before = weights(net)
    with pytest.raises(StepError, match=message):
        opt.backward(loss(net))
    assert not any(moved(net, before))
    assert opt.named_state_dict()["step"] == 0  # nothing was updated, and training can continue
    opt.zero_grad()
    opt.backward(net())
    assert opt.last_step.step == 1 and all(moved(net, before))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": 1024}, r"the loss must be scaled: call opt\.backward"),
        ({"clip_norm": 1.0, "policy": "two_pass"}, r"policy 'two_pass'.*no gradients have been measured.*opt\.backw"),
    ],
)
def test_a_plain_backward_that_the_policy_does_not_support_raises(net, options, message):
    opt, before = make(net, **{"policy": "auto", **options}), weights(net)
    with pytest.raises(StepError, match=message):
        net().backward()
    assert not any(moved(net, before)) and opt.last_step is None
    opt.zero_grad()
    opt.backward(net())


@pytest.mark.troubleshooting("... backwards came before this step()")
def test_a_second_backward_before_step(net, opt):
    """This raises only if the loop calls step(): otherwise every backward is a step of its own."""
    opt.backward(net())
    opt.backward(net())
    with pytest.raises(StepError, match=r"2 backwards came before this step\(\).*`with opt\.accumulate\(\):`"):
        opt.step()
    opt.backward(net())
    opt.step()
    opt.backward(net())
    for plain in (False, True):
        before = weights(net)
        with pytest.raises(StepError, match=r"a second backward before step\(\).*`with opt\.accumulate\(\):`"):
            backward(opt, net(), plain)
        assert not any(moved(net, before))
        net.zero_grad()
    with pytest.raises(StepError, match="a second backward before step"):
        opt.backward(lambda: pytest.fail("the forward was computed"))
    opt.step()
    opt.backward(net())
    assert opt.last_step.step == 5


def test_other_calls_inside_a_step(net, opt):
    def save(_):
        with pytest.raises(StepError, match="cannot save in the middle of step 1"):
            opt.state_dict()

    @torch.enable_grad()
    def again(_):
        opt.backward(net())

    handle = net.early.weight.register_hook(save)
    opt.backward(net())
    opt.state_dict()
    handle.remove()
    net.early.weight.register_hook(again)
    with pytest.raises(StepError, match="a backward started inside the step of another"):
        opt.backward(net())


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_weights_do_not_change_before_the_last_micro_batch(net):
    opt, before = make(net, "deferred"), weights(net)
    for _ in range(3):
        with opt.accumulate():
            with opt.accumulate():
                opt.backward(net())
            opt.backward(net())
        assert same(before, weights(net)) and opt.last_step is None
        with pytest.raises(StepError, match=r"cannot save in the middle of step 1: .* but the last backward of the st"):
            opt.state_dict()
    opt.backward(net())
    assert all(moved(net, before))
    assert opt.named_state_dict()["step"] == opt.last_step.step == 1


def test_loading_discards_accumulated_micro_batches(net):
    opt = make(net, "deferred")
    saved = opt.state_dict()
    with opt.accumulate():
        opt.backward(1e3 * net())
    opt.load_state_dict(saved)
    opt.backward(net())
    assert opt.last_step.step == 1
    assert opt.last_step.grad_norm < 1e2


# -- two passes --------------------------------------------------------------------------------------------------------


def test_other_leaves_get_their_gradient_once(net):
    """The measuring pass must not add to the gradient of an input or of another optimizer's parameter."""
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


def half_a_per_cent_larger(net, every):
    """Returns a loss whose gradients, or only the gradient of `early`, grow by 0.5% with each backward."""
    x, calls = torch.randn(8, 4), itertools.count()
    part = net(x) if every else net.early(x).square().sum() * 10
    part.register_hook(lambda grad: grad * (1 + 0.005 * next(calls)))
    return part if every else part + 1e-3 * net(x)


@pytest.mark.parametrize(("loss_scale", "every"), [(None, False), (1024.0, True)])
def test_a_different_replay_raises(net, loss_scale, every):
    opt = make(net, "two_pass", clip_norm=0.5, loss_scale=loss_scale)
    opt.backward(half_a_per_cent_larger(net, every))
    for go_on in (lambda: opt.backward(net()), opt.state_dict):
        with pytest.raises(StepError, match=r"step 1 is torn: its second pass computed other gradients.*'deferred'"):
            go_on()
    opt.accept_torn_step()
    opt.backward(net())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_identical_replay_does_not_raise(dtype):
    """The check must tolerate rounding: gradients differ in size, one has several tiles and equal elements, whose sums
    round in one direction, and a bias has a gradient that is only the rounding error of canceling terms."""
    wide = torch.nn.Linear(600, 500).to(dtype)
    narrow = torch.nn.Sequential(torch.nn.Linear(6, 70), torch.nn.Dropout(), torch.nn.Linear(70, 6)).to(dtype)
    shift = torch.nn.Parameter(torch.zeros((), dtype=dtype))
    params = [*wide.parameters(), *narrow.parameters(), shift]
    opt = lowmem.FusedOptimizer(params, "lomo", lr=1e-6, policy="two_pass", clip_norm=1.0)
    for step in range(20):
        x = torch.randn(8, 6, dtype=dtype) * 10.0 ** (step % 5 - 3)
        logits = narrow(x) + shift
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.zeros(8, dtype=torch.long))
        if step % 10 == 0:
            loss = loss + wide(torch.full((2, 600), 0.3331, dtype=dtype)).sum().float()
        opt.backward(loss)
    assert opt.named_state_dict()["step"] == 20


class InTurn(torch.autograd.Function):
    """Each backward returns gradients for a different set of parameters."""

    @staticmethod
    def forward(ctx, turns, late, middle):
        ctx.turns, ctx.params = iter(turns), {"late": late, "middle": middle}
        return late.sum() + middle.sum()

    @staticmethod
    def backward(ctx, grad):
        now = next(ctx.turns)
        return None, *(torch.ones_like(param) if name in now else None for name, param in ctx.params.items())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("late", "middle"), ("late",), r"second pass computed no gradient for 'middle\.weight', but the first pass d"),
        (("late",), ("late", "middle"), r"'middle\.weight' got a gradient in the second pass but not in the first"),
    ],
)
def test_passes_over_different_parameters_raise(net, first, second, message):
    opt = make(net, "two_pass", clip_norm=0.5, batching=False)
    with pytest.raises(StepError, match=message):
        opt.backward(InTurn.apply([first, second], net.late.weight, net.middle.weight))


# -- reentrant checkpointing -------------------------------------------------------------------------------------------


@pytest.mark.by_tiles("small parameters wait in a stack, and none that is compiled does")
@pytest.mark.troubleshooting("got its gradient in two parts")
def test_reentrant_checkpointing_of_a_tied_weight():
    """The weight is used inside and outside of the checkpointed region, so its hook is called twice."""
    shared = torch.nn.Linear(4, 4, bias=False)
    opt = lowmem.FusedOptimizer(shared.named_parameters())

    def loss(reentrant):
        return shared(checkpoint(shared, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant)).sum()

    with pytest.raises(StepError, match=r"'weight' got its gradient in two parts.*use_reentrant=False"):
        opt.backward(loss(reentrant=True))
    opt.accept_torn_step()
    opt.zero_grad()
    opt.backward(loss(reentrant=False))


def test_reentrant_checkpointing_in_a_measuring_pass(net):
    """torch's message would mislead: the user did not call a backward with `inputs`."""
    x, before = torch.ones(2, 4, requires_grad=True), weights(net)
    opt = make(net, "two_pass", clip_norm=1.0)
    with pytest.raises(UnsupportedError, match=r"policy='deferred'.*use_reentrant=False"):
        opt.backward(net(x, reentrant=True))
    assert not any(moved(net, before))
    opt.backward(net(x))
    with pytest.raises(RuntimeError, match="is incompatible with"):  # a user's own call still gets torch's message
        torch.autograd.grad(net(x, reentrant=True), [x])


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
def test_auto_defers_where_reentrant_checkpointing_rules_out_two_passes(net, caplog):
    """The policy changes in the first step whose forward uses it. Graphs of other losses are ignored."""
    caplog.set_level("INFO")
    plain, other = Net().eval(), Net()(torch.ones(2, 4, requires_grad=True), reentrant=True)
    plain.load_state_dict(net.eval().state_dict())
    ordinary = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    opt = make(net, "auto", rule=torch.optim.AdamW, clip_norm=0.5, model=net)
    for step in range(4):
        x, reentrant = torch.randn(2, 4, requires_grad=True), True if step else None
        norm = plain_step(ordinary, plain(x), clip_norm=0.5)

        def loss(x=x, reentrant=reentrant):
            return net(x, reentrant=reentrant)

        opt.backward(loss if step % 2 else loss())
        assert opt.policy == ("deferred" if step else "two_pass")
        assert torch.equal(opt.last_step.grad_norm.float(), norm)
    assert not any(moved(net, weights(plain)))
    assert sum("reentrant activation checkpointing" in line for line in caplog.messages) == 1
    del other


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_auto_defers_for_a_compiled_model(net):
    """Its backward runs only once, because it reuses the memory of its graph."""
    compiled, before = torch.compile(lambda: net(torch.ones(2, 4)).tanh(), backend="aot_eager"), weights(net)
    for policy in ("auto", "two_pass"):
        opt = make(net, policy, clip_norm=0.5)
        with pytest.raises(UnsupportedError, match=r"torch\.compile") if policy == "two_pass" else nullcontext():
            opt.backward(compiled())
        opt.remove()
    assert all(moved(net, before))


@pytest.mark.parametrize(("rule", "policy"), [("lomo", "immediate"), (torch.optim.AdamW, "deferred")])
def test_a_plain_backward_around_other_passes_raises_before_the_first_update(net, rule, policy):
    before, x = weights(net), torch.ones(2, 4, requires_grad=True)
    opt = make(net, policy, rule=rule, batching=False)
    with pytest.raises(StepError, match=r"one backward inside another.*use_reentrant=False\), or opt\.backward\(loss"):
        net(x, reentrant=True).backward()
    assert not any(moved(net, before)) and opt.last_step is None
    net.zero_grad()
    opt.backward(net(x, reentrant=True))
    assert all(moved(net, before)) and opt.last_step.step == 1


# -- backwards that fail -----------------------------------------------------------------------------------------------


def fail(net, opt, plain=False, at="middle", when=1):
    """Runs a backward that raises before the gradient of layer `at`, in the `when`-th pass that reaches it."""
    passes = itertools.count(1)
    handle = getattr(net, at).weight.register_hook(lambda grad: boom(grad) if next(passes) == when else None)
    with pytest.raises(Boom) as died:
        backward(opt, net(), plain)
    handle.remove()
    net.zero_grad()
    return died.value


def test_a_graph_that_allows_one_backward_under_two_pass(net):
    once = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    loss = checkpoint(net, torch.ones(2, 4), use_reentrant=False, context_fn=once)
    with pytest.raises(RuntimeError) as failed:
        make(net, "two_pass", clip_norm=0.5).backward(loss)
    assert "use policy='deferred'" in failed.value.__notes__[0]


TORN = r"step 2 is torn.*accept_torn_step\(\)"


@PLAIN
@pytest.mark.parametrize("way_out", ["load_state_dict", "accept_torn_step"])
@pytest.mark.troubleshooting("step ... is torn")
def test_a_step_that_fails_after_its_first_update_is_torn(net, opt, plain, way_out):
    """Only `late` has been updated when the backward fails."""
    opt.backward(net())
    saved, before = opt.state_dict(), weights(net)
    error = fail(net, opt, plain)
    assert moved(net, before) == [False, False, True]
    if not plain:
        assert "step 2 is torn: its backward ended with Boom after 1 parameter" in error.__notes__[0]
    before = weights(net)
    for go_on in (opt.state_dict, lambda: opt.backward(net()), lambda: net().backward()):
        with pytest.raises(StepError, match=TORN):
            go_on()
        opt.zero_grad()
    assert not any(moved(net, before))
    opt.load_state_dict(saved) if way_out == "load_state_dict" else opt.accept_torn_step()
    opt.backward(net.early.weight.sum())  # the report contains only this gradient
    assert (opt.last_step.names, opt.last_step.grad_norm.item()) == (("early.weight",), 4.0)
    assert opt.named_state_dict()["step"] == opt.last_step.step == (2 if way_out == "load_state_dict" else 3)


@pytest.mark.by_tiles("small parameters wait in a stack, and none that is compiled does")
@pytest.mark.parametrize(
    ("policy", "plain", "next_plain"),
    [("auto", False, True), ("auto", True, False), ("two_pass", False, False), ("deferred", True, True)],
)
def test_a_step_that_fails_before_its_first_update_can_be_repeated(net, plain, next_plain, policy):
    """The failure comes while small parameters wait to be stacked, in a measuring pass, or while gradients are stored.
    The clip coefficient of the failed step is not used."""
    options = {"policy": policy, "clip_norm": None if policy == "auto" else 0.5}
    other = Net().eval()
    other.load_state_dict(net.eval().state_dict())
    opts = [make(one, **options) for one in (net, other)]
    before = weights(net)
    fail(net, opts[0], plain)
    assert not any(moved(net, before))
    for one, opt in zip((net, other), opts, strict=True):
        backward(opt, 1e-6 * one(), next_plain)
    assert not any(moved(net, weights(other)))
    assert opts[0].named_state_dict()["step"] == 1
    assert opts[0].last_step.clip_coef in (None, 1.0)


@pytest.mark.by_tiles("small parameters wait in a stack, and none that is compiled does")
def test_the_gradients_of_a_failed_backward_are_not_applied_in_the_next(net):
    opt, before = make(net, "auto"), weights(net)
    fail(net, opt)
    opt.backward(net.early.weight.sum())
    assert moved(net, before) == [True, False, False]


@pytest.mark.by_tiles("small parameters wait in a stack, and none that is compiled does")
def test_a_plain_backward_that_fails_before_its_first_update_does_not_count(net):
    """A loop that calls step() and zero_grad() can continue, and the next step has the same number."""
    opt, steps = make(net, "auto", rule="adafactor"), []
    scalars, rule = opt._parameters.groups[0].rule.scalars, opt._parameters.groups[0].rule
    rule.scalars = lambda hyper, step: steps.append(step) or scalars(hyper, step)
    net().backward()
    opt.step()
    opt.zero_grad()
    fail(net, opt, plain=True)
    opt.step()
    opt.backward(net())
    assert (steps, opt.last_step.step) == ([1, 2, 2], 2)


def test_a_failed_second_pass_leaves_a_torn_step(net):
    opt = make(net, "two_pass", clip_norm=0.5, batching=False)
    fail(net, opt, when=2)
    with pytest.raises(StepError, match="step 1 is torn: its backward ended with Boom after 1 parameter"):
        opt.backward(net())
