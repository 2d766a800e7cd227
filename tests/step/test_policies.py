"""The life cycle of a step: whatever would not be ordinary training is noticed, named, and has a way out."""

import pytest
import torch
from support.nets import weights
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.errors import StepError, UnsupportedError


class Boom(Exception):
    pass


class Net(torch.nn.Module):
    """Three layers, each [4, 4]: `early` gets its gradient last."""

    def __init__(self):
        super().__init__()
        self.early, self.middle, self.late = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x=None, *, break_at=None, reentrant=None):
        """The loss. Backward dies before the gradient of layer `break_at`; `reentrant` checkpoints `middle`."""
        x = torch.ones(2, 4, device=self.early.weight.device) if x is None else x
        for name in ("early", "middle", "late"):
            layer = getattr(self, name)
            x = (
                checkpoint(layer, x, use_reentrant=reentrant)
                if name == "middle" and reentrant is not None
                else layer(x)
            )
            if name == break_at:
                x.register_hook(boom)
        return x.square().sum()


def boom(_):
    raise Boom("somewhere in backward")


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def opt(net):
    return lowmem.FusedOptimizer(net.named_parameters(), lr=0.01, batching=False)


def moved(net, before):
    return [not torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True)]


# -- what cannot be a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        pytest.param(
            lambda net: net.late(torch.ones(2, 4)),
            r"\[2, 4\]; it must be",
            marks=pytest.mark.troubleshooting("the loss is of shape"),
        ),
        (lambda net: lambda: 3.0, "the loss is a float; it must be"),
        pytest.param(
            lambda net: net().detach(), "the loss has", marks=pytest.mark.troubleshooting("the loss has no graph")
        ),
        pytest.param(
            lambda net: torch.ones((), requires_grad=True) * 2,
            "got a gradient",
            marks=pytest.mark.troubleshooting("no parameter of this optimizer"),
        ),
    ],
)
def test_no_step_from_this(net, opt, loss, message):
    before = weights(net)
    with pytest.raises(StepError, match=message):
        opt.backward(loss(net))
    assert opt.named_state_dict()["step"] == 0  # nothing happened, and training may go on
    opt.backward(net())
    assert opt.last_step.step == 1
    assert all(moved(net, before))


@pytest.mark.troubleshooting("parameter ... already has")
def test_leftover_gradient(net, opt):
    net.middle.weight.grad = torch.ones(4, 4)
    before = weights(net)
    with pytest.raises(StepError, match=r"'middle\.weight' already has a gradient in \.grad"):
        opt.backward(net())
    assert not any(moved(net, before))
    opt.zero_grad()
    opt.backward(net())


@pytest.mark.troubleshooting("... backwards came before this step()")
@pytest.mark.troubleshooting("a second backward before step()")
def test_accumulation(net, opt):
    """A loop that calls step() and runs two backwards before it meant to accumulate; one that never does, did not."""
    opt.backward(net())
    opt.backward(net())
    with pytest.raises(StepError, match=r"2 backwards came before this step\(\).*`with opt\.accumulate\(\):`"):
        opt.step()
    opt.backward(net())
    opt.step()
    opt.backward(net())
    for again in (lambda: opt.backward(net()), lambda: net().backward()):
        before = weights(net)
        with pytest.raises(StepError, match=r"a second backward before step\(\).*`with opt\.accumulate\(\):`"):
            again()
        assert not any(moved(net, before))
        net.zero_grad()
    opt.step()
    opt.backward(net())
    assert opt.last_step.step == 5


@pytest.mark.troubleshooting("with a loss scale")
def test_plain_backward_with_loss_scale(net):
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=0.01, loss_scale=1024)
    before = weights(net)
    with pytest.raises(StepError, match=r"with a loss scale the loss must be scaled: call opt\.backward"):
        net().backward()
    assert not any(moved(net, before))
    assert opt.last_step is None


# -- a hook that fires twice -------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """One weight, inside a checkpoint and outside."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(4, 4, bias=False)

    def forward(self, reentrant):
        x = torch.ones(2, 4, requires_grad=True)
        return self.shared(checkpoint(self.shared, x, use_reentrant=reentrant)).sum()


@pytest.mark.by_tiles("small parameters wait in a stack, and none that is compiled does")
@pytest.mark.troubleshooting("got its gradient in two parts")
def test_reentrant_checkpointing_of_a_tied_weight():
    tied = Tied()
    opt = lowmem.FusedOptimizer(tied.named_parameters())
    with pytest.raises(StepError, match=r"'shared\.weight' got its gradient in two parts.*use_reentrant=False"):
        opt.backward(tied(reentrant=True))
    opt.accept_torn_step()
    opt.zero_grad()
    opt.backward(tied(reentrant=False))


@pytest.mark.troubleshooting("reentrant activation checkpointing")
def test_reentrant_checkpointing_of_the_first_gradient():
    """The inner backward's hooks come first: refused before anything moves."""
    layer = torch.nn.Linear(4, 4)
    opt = lowmem.FusedOptimizer(layer.named_parameters())
    before = weights(layer)
    with pytest.raises(StepError, match="one backward inside another"):
        checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum().backward()
    assert not any(moved(layer, before))
    assert opt.last_step is None


def test_reentrant_checkpointing_in_a_measuring_pass(net):
    """torch refuses it in words that do not help: nobody wrote the backward with chosen leaves."""
    x, before = torch.ones(2, 4, requires_grad=True), weights(net)
    opt = lowmem.FusedOptimizer(net.named_parameters(), policy="two_pass", clip_norm=1.0)
    with pytest.raises(UnsupportedError, match=r"use_reentrant=False\), or policy='deferred'"):
        opt.backward(net(x, reentrant=True))
    assert not any(moved(net, before))
    opt.backward(net(x))
    with pytest.raises(RuntimeError, match="is incompatible with"):  # its own words where they help
        torch.autograd.grad(net(x, reentrant=True), [x])


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
@pytest.mark.parametrize("called", [False, True])
def test_auto_defers_where_reentrant_checkpointing_rules_out_two_passes(net, called, caplog):
    """From the step on whose forward has it; one before takes two passes."""
    caplog.set_level("INFO")
    plain = Net()
    plain.load_state_dict(net.state_dict())
    ordinary = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    rule = {"rule": torch.optim.AdamW, "lr": 0.01, "clip_norm": 0.5}
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **rule)
    for step in range(4):
        x, reentrant = torch.randn(2, 4, requires_grad=True), True if step else None
        plain(x).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        ordinary.step()
        ordinary.zero_grad()

        def loss(x=x, reentrant=reentrant):
            return net(x, reentrant=reentrant)

        opt.backward(loss if called else loss())
        assert opt.policy == ("deferred" if step else "two_pass")
        assert torch.equal(opt.last_step.grad_norm.float(), norm)
    assert not any(moved(net, weights(plain)))
    assert opt.last_step.step == 4
    assert sum("reentrant activation checkpointing" in line for line in caplog.messages) == 1


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
def test_graphs_of_other_losses_do_not_count(net):
    other = Net()(torch.ones(2, 4, requires_grad=True), reentrant=True)
    opt = lowmem.FusedOptimizer(net.named_parameters(), clip_norm=1.0)
    opt.backward(net())
    assert opt.policy == "two_pass"
    del other


@pytest.mark.parametrize("policy", ["immediate", "deferred"])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, "lomo"])
def test_a_plain_backward_around_others_is_refused_before_the_first_update(net, rule, policy):
    before, x = weights(net), torch.ones(2, 4, requires_grad=True)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=rule, lr=0.01, policy=policy, batching=False)
    with pytest.raises(StepError, match=r"use_reentrant=False\), or opt\.backward\(loss\)"):
        net(x, reentrant=True).backward()
    assert not any(moved(net, before))
    net.zero_grad()
    opt.backward(net(x, reentrant=True))
    assert all(moved(net, before)) and opt.last_step.step == 1


def test_a_plain_backward_around_frozen_layers(net):
    """The backward inside it updates nothing."""
    net.middle.requires_grad_(False)
    before = weights(net)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.AdamW, lr=0.01)
    net(torch.ones(2, 4, requires_grad=True), reentrant=True).backward()
    assert moved(net, before) == [True, False, True] and opt.last_step.step == 1


# -- torn steps --------------------------------------------------------------------------------------------------------


def tear(net, opt, plain):
    """A backward that dies after `late` has moved and before `middle` and `early` have."""
    before = weights(net)
    with pytest.raises(Boom) as died:
        net(break_at="middle").backward() if plain else opt.backward(net(break_at="middle"))
    assert moved(net, before) == [False, False, True]
    return died.value


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.troubleshooting("step ... is torn")
def test_torn_step_refuses_to_go_on(net, opt, plain):
    opt.backward(net())
    saved = opt.state_dict()
    error = tear(net, opt, plain)
    if not plain:
        assert "step 2 is torn: its backward ended with Boom after 1 parameter" in error.__notes__[0]
    before = weights(net)
    for go_on in (opt.state_dict, lambda: opt.backward(net()), lambda: net().backward()):
        with pytest.raises(StepError, match=r"step 2 is torn.*accept_torn_step\(\)"):
            go_on()
        opt.zero_grad()
    assert not any(moved(net, before))
    opt.load_state_dict(saved)
    opt.backward(net())
    assert opt.last_step.step == 2


@pytest.mark.parametrize("plain", [False, True])
def test_torn_step_accepted_by_name(net, opt, plain):
    tear(net, opt, plain)
    opt.accept_torn_step()
    opt.zero_grad()
    before = weights(net)
    opt.backward(net())
    assert all(moved(net, before))
    assert opt.named_state_dict()["step"] == 2


def test_the_report_after_a_torn_step_is_of_its_own_gradients(net, opt):
    tear(net, opt, plain=False)  # `late` had its gradient
    opt.accept_torn_step()
    opt.zero_grad()
    opt.backward(net.early.weight.sum())
    assert opt.last_step.names == ("early.weight",)
    assert opt.last_step.grad_norm.item() == 4.0


@pytest.mark.by_tiles("small parameters wait in a stack, and none that is compiled does")
@pytest.mark.parametrize("plain", [False, True])
def test_backward_that_dies_while_small_parameters_wait_tears_nothing(net, plain):
    """What waits for its like has not moved yet, and is forgotten."""
    other = Net()
    other.load_state_dict(net.state_dict())
    opts = [lowmem.FusedOptimizer(one.named_parameters(), rule="lomo", lr=0.01) for one in (net, other)]
    before = weights(net)
    with pytest.raises(Boom):
        net(break_at="middle").backward() if plain else opts[0].backward(net(break_at="middle"))
    assert not any(moved(net, before))
    for one, opt in zip((net, other), opts, strict=True):
        one.zero_grad()
        one().backward() if plain else opt.backward(one())
    assert not any(moved(net, weights(other)))
    assert opts[0].named_state_dict()["step"] == 1


def test_saving_in_the_middle_of_a_step(net, opt):
    def save(_):
        with pytest.raises(StepError, match="cannot save in the middle of step 1"):
            opt.state_dict()

    net.early.weight.register_hook(save)
    opt.backward(net())
    opt.state_dict()


def test_backward_inside_a_step(net, opt):
    @torch.enable_grad()
    def again(_):
        opt.backward(net())

    net.early.weight.register_hook(again)
    with pytest.raises(StepError, match="a backward started inside the step of another"):
        opt.backward(net())
