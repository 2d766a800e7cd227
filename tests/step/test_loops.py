"""Training loops as users write them train correctly or raise before the first update."""

import copy
import gc
import itertools
import math
import pickle
import re
import threading
import warnings
from collections import defaultdict

import pytest
import torch
from support.nets import assert_same, plain_step, same, weights
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.optim.lr_scheduler import LambdaLR

import lowmem
from lowmem.errors import StepError, UnsupportedError

DATA = torch.arange(12.0).view(4, 3) / 10


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net, n=0):
    return net(DATA + n).square().mean()


def ordinary(net, steps):
    """Trains with torch's SGD. Each step is a list of numbers, one per micro-batch."""
    opt = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for micro_batches in steps:
        plain_step(opt, *(loss_of(net, n) for n in micro_batches))
    return weights(net)


def lomo(net, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), **{"rule": "lomo", "lr": 0.1, **options})


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_a_failed_plain_micro_batch_drops_the_previous_ones(caplog):
    net = make_net()
    opt = lomo(net)
    with opt.accumulate():
        loss_of(net, 1).backward()
        handle = net[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(net, 1).backward()
        handle.remove()
        loss_of(net, 2).backward()
    loss_of(net, 3).backward()
    assert "a backward failed, and the 1 micro-batch(es) before it were dropped" in caplog.text
    assert same(weights(net), ordinary(make_net(), [[2, 3]]))


@pytest.mark.troubleshooting("zero_grad() before step()")
def test_zero_grad_cannot_take_an_update_back():
    net = make_net()
    opt = lomo(net)
    opt.backward(loss_of(net))
    opt.zero_grad()  # this loop does not call step()
    opt.backward(loss_of(net))
    opt.zero_grad()
    net, opt = (net := make_net()), lomo(net)
    opt.backward(loss_of(net))
    opt.step()
    opt.zero_grad()
    opt.backward(loss_of(net))
    with pytest.raises(StepError, match=r"zero_grad\(\) before step\(\).*opt\.paused\(\)"):
        opt.zero_grad()


@pytest.mark.parametrize("plain", [False, True])
def test_a_closure(plain):
    net = make_net()
    opt = lomo(net)

    def closure():
        opt.zero_grad()
        loss = loss_of(net)
        loss.backward() if plain else opt.backward(loss)
        return loss

    losses = [opt.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[-1]
    assert same(weights(net), ordinary(make_net(), [[0]] * 3))


# -- freezing ----------------------------------------------------------------------------------------------------------


def unfrozen_later(**options):
    """Returns a model whose first layer was not passed to the optimizer and is trained now."""
    net = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    opt = lowmem.FusedOptimizer(net[1].parameters(), "lomo", lr=0.1, model=net, **options)
    opt.backward(net(torch.ones(3)).sum())
    net[0].requires_grad_(True)
    return net, opt


def test_a_parameter_unfrozen_later_that_was_not_passed(caplog):
    """The warning contains the line that adds the parameter."""
    net, opt = unfrozen_later()
    for _ in range(2):
        opt.backward(net(torch.ones(3)).sum())
    (text,) = caplog.messages
    line = re.fullmatch(r"parameter '0\.weight' was frozen .* not updated\. .* write (.*), and so on for 1 .*", text)
    before = net[0].weight.clone()
    net.zero_grad()
    eval(line[1], {"opt": opt, "model": net})
    opt.backward(net(torch.ones(3)).sum())
    assert not torch.equal(net[0].weight, before)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["", "clipped"])
def test_a_parameter_unfrozen_later_that_another_optimizer_has(options, caplog):
    """A GAN does this. The other optimizer need not have been stepped since."""
    net, opt = unfrozen_later(**options)
    other = lomo(net[0])
    with other.paused():
        opt.backward(net(torch.ones(3)).sum())
    assert not caplog.messages


# -- several optimizers ------------------------------------------------------------------------------------------------


def test_two_optimizers_and_one_backward():
    """A plain backward updates the parameters of both, but opt.backward must not update another optimizer's."""
    net = make_net()
    before = weights(net)
    one = lowmem.FusedOptimizer(net[0].named_parameters(), rule="lomo", lr=0.1)
    two = lowmem.FusedOptimizer(net[2].named_parameters(), rule="lomo", lr=0.1)
    with one.accumulate(), pytest.raises(StepError, match=r"micro-batch for one FusedOptimizer.*'weight'.*groups="):
        loss_of(net, 0).backward()
    with pytest.raises(StepError, match=r"reaches parameter '.*' of another FusedOptimizer.*with other\.paused\(\)"):
        one.backward(loss_of(net))
    assert same(weights(net), before)
    net.zero_grad()
    loss_of(net, 0).backward()
    with one.accumulate(), two.accumulate():
        loss_of(net, 1).backward()
    loss_of(net, 2).backward()
    assert same(weights(net), ordinary(make_net(), [[0], [1, 2]]))


def test_a_generator_and_a_discriminator():
    """The generator's backward passes through the discriminator but must not update it."""

    def run(make, step):
        generator, discriminator = make_net(1), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        opt_g, opt_d = make(generator), make(discriminator)
        for n in range(3):
            fake = generator(DATA + n)
            step(opt_d, opt_g, (discriminator(DATA[:, :2]) - discriminator(fake.detach())).mean())
            step(opt_g, opt_d, discriminator(fake).mean())
        assert all(param.grad is None for param in [*generator.parameters(), *discriminator.parameters()])
        return weights(generator) + weights(discriminator)

    def ordinary_step(opt, other, loss):
        opt.zero_grad()
        plain_step(opt, loss)
        other.zero_grad()

    def fused_step(opt, other, loss):
        with other.paused():
            opt.backward(loss)

    want = run(lambda net: torch.optim.AdamW(net.parameters(), foreach=False), ordinary_step)
    assert same(run(lambda net: lomo(net, rule="adamw", lr=1e-3, weight_decay=0.01), fused_step), want)


def test_a_paused_optimizer_does_not_step():
    net = make_net()
    opt = lomo(net)
    with opt.paused(), pytest.raises(StepError, match=r"backward\(\) of an optimizer that is inside its paused\(\)"):
        opt.backward(loss_of(net))


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["immediate", "two_pass", "deferred"])
def test_gradients_that_share_memory(policy):
    """For a sum of two views, autograd returns two views of one gradient, which must not be modified twice."""

    def parameters():
        return [nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)), nn.Parameter(torch.linspace(0, 2, 6).view(3, 2))]

    def loss_of(a, b):
        return ((a.view(-1) + b.view(-1)) ** 2).sum()

    clip = {} if policy == "immediate" else {"clip_norm": 2.0}
    a, b = parameters()
    opt = lowmem.FusedOptimizer(
        [("a", a), ("b", b)], rule="lomo", lr=0.1, policy=policy, loss_scale=8.0, clip_value=3.0, batching=False, **clip
    )
    opt.backward(loss_of(a, b))
    x, y = parameters()
    loss_of(x, y).backward()
    y.grad = y.grad.clone()  # torch's own clipping would take effect twice
    clip_grad_value_([x, y], 3.0)
    if clip:
        clip_grad_norm_([x, y], 2.0)
    torch.optim.SGD([x, y], lr=0.1, foreach=False).step()
    assert same([a, b], [x, y])


@pytest.mark.cpu_only("the simulated GPU has no sparse tensors")
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_converted_to_dense(cls):
    def run(make, backward):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 1))
        opt = make(net)
        for n in range(3):
            backward(opt, net(torch.tensor([1, 2, 2, n])).square().mean())
        return weights(net)

    want = run(lambda net: cls(net.parameters(), lr=0.1, foreach=False), plain_step)
    got = run(lambda net: lomo(net, rule=cls, foreach=False), lambda opt, loss: opt.backward(loss))
    for one, other in zip(got, want, strict=True):  # torch sums duplicate indices of a sparse gradient in another order
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# -- habits from other optimizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "opt.backward"])
def test_a_grad_scaler(how):
    net = make_net()
    opt = lomo(net)
    before = weights(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(StepError, match=r'GradScaler has scaled the loss.*loss_scale="dynamic".*opt\.backward\(loss\)'):
        scaler.scale(loss_of(net)).backward() if how == "plain" else opt.backward(scaler.scale(loss_of(net)))
    assert same(weights(net), before)
    with pytest.raises(StepError, match="GradScaler has scaled the loss"):
        sum(scaler.scale(loss_of(net, n) for n in range(2))).backward()
    assert same(weights(net), before)
    other = make_net()
    scaler.scale(loss_of(other)).backward()  # no FusedOptimizer updates this one
    assert all(param.grad is not None for param in other.parameters())
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(net)).backward()
    off.step(opt)
    off.update()
    assert same(weights(net), ordinary(make_net(), [[0]]))


def lost(option, function=None):
    return (
        rf"^{function or option.replace('_', '_grad_') + '_'}\(\): parameter '0.weight' has no gradient.*{option}=0.05"
    )


CLIPPED = {
    "a norm": (lambda params: clip_grad_norm_(params, 0.05), lost("clip_norm")),
    "to read the norm": (lambda params: clip_grad_norm_(params, math.inf), "Omit this call. opt.last_step.grad_norm"),
    "a known norm": (
        lambda params: clip_grads_with_norm_(params, 0.05, torch.tensor(2.0)),
        lost("clip_norm", "clip_grads_with_norm_"),
    ),
    "a value": (lambda params: clip_grad_value_(params, 0.05), lost("clip_value")),
    "a value by name": (lambda params: clip_grad_value_(parameters=params, clip_value=0.05), "clip_value=0.05"),
}


@pytest.mark.parametrize(("clip", "message"), CLIPPED.values(), ids=CLIPPED)
def test_clipping_after_backward(clip, message):
    """Only calls for these parameters raise; torch's functions still work for others and after `remove()`."""
    net, other, plain = make_net(), make_net(1), make_net(1)
    opt = lomo(net)
    for model in (net, other, plain):
        loss_of(model).backward()
    with pytest.raises(StepError, match=message):
        clip(net.parameters())
    with opt.accumulate():
        loss_of(net).backward()
        with pytest.raises(StepError, match=r"or stored it inside accumulate\(\)"):
            clip(net.parameters())
    opt.zero_grad()
    opt.remove()
    if "norm" in message:
        clip(net.parameters())  # torch sees no gradient
    clip(other.parameters())
    first = plain[0].weight.grad
    if clip is not CLIPPED["to read the norm"][0]:
        assert not torch.equal(other[0].weight.grad, first)
    assert other[0].weight.grad.norm() <= first.norm()


# -- parameter groups that are edited ----------------------------------------------------------------------------------


def setting(key, value):
    return lambda opt: opt.param_groups[1].update({key: value})


PARAMS, COUNT = "'params' of parameter group 0 was changed", "the number of parameter groups was changed"
EDITS = {
    "shortened": (lambda opt: opt.param_groups[0]["params"].pop(0), PARAMS),
    "another group": (lambda opt: opt.param_groups.insert(1, dict(opt.param_groups.pop(1))), "group 1 was changed"),
    "one more": (lambda opt: opt.param_groups.append({**opt.param_groups[0], "params": []}), COUNT),
    "rule": (setting("rule", "adamw"), "'rule' of parameter group 1 was"),
    "rounding": (setting("rounding", "compensated"), "'rounding' of parameter group 1 was"),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS)
def test_unsupported_edits_of_groups_raise(edit, message, plain):
    net = make_net()
    opt = lowmem.FusedOptimizer([{"params": net[n].named_parameters(str(n))} for n in (0, 2)], rule="lomo", lr=0.1)
    opt.backward(loss_of(net))
    before = weights(net)
    edit(opt)
    with pytest.raises(StepError, match=f"{message}.*add_param_group"):
        loss_of(net).backward() if plain else opt.backward(loss_of(net))
    assert same(weights(net), before)


def test_a_setting_by_name_is_edited_for_a_parameter_that_shares_its_program():
    params = {name: nn.Parameter(torch.ones(4, 4)) for name in "ab"}
    opt = lowmem.FusedOptimizer(params.items(), rule="lans", lr=0.1, lr_mult={})
    opt.param_groups[0]["lr_mult"]["b"] = 2.0
    with pytest.raises(StepError, match="form of the update of 'b' was changed"):
        opt.backward(sum(param.sum() for param in params.values()))


# -- gradients with a graph --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rule": "adafactor"}, {"policy": "deferred", "clip_norm": 1.0}], ids=str)
def test_a_backward_that_creates_a_graph(options):
    """The updates are the same as without a graph, and no state or stored gradient keeps the graph alive."""
    nets = make_net(), make_net()
    opts = [lomo(net, **{"rule": "adamw", **options}) for net in nets]
    for net, create_graph in zip(nets, (False, True), strict=True):
        for n in range(2):
            loss_of(net, n).backward(create_graph=create_graph)
    assert same(*map(weights, nets))
    states = [state for states in opts[1].state.values() for state in states.values()]
    assert states and not any(state.requires_grad for state in states)


# -- states that the loop resets ---------------------------------------------------------------------------------------


RESETS = {
    "replaced": lambda opt, net: setattr(opt, "state", defaultdict(dict)),
    "cleared": lambda opt, net: opt.state.clear(),
    "of one": lambda opt, net: opt.state.pop(net[0].weight, None),
    "emptied": lambda opt, net: opt.state.update({net[0].weight: {}}),
    "looked at": lambda opt, net: [opt.state[param] for param in net.parameters()],
    "halved": lambda opt, net: setattr(opt, "state", defaultdict(dict, {p: opt.state[p] for p in net[2].parameters()})),
}


@pytest.mark.parametrize(
    ("reset", "step", "batching"), [*itertools.product(RESETS, [2], [True, False]), ("looked at", 0, True)]
)
def test_states_that_the_loop_resets(reset, step, batching):
    """Matches torch's AdamW, whose step count is reset too."""
    net, expected = make_net(), make_net()
    opt = lomo(net, rule="adamw", batching=batching)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1, foreach=False)
    for n in range(5):
        if n == step:
            RESETS[reset](opt, net)
            RESETS[reset](plain, expected)
            opt.named_state_dict()
        opt.backward(loss_of(net, n))
        plain_step(plain, loss_of(expected, n))
    assert same(weights(net), weights(expected))


def test_a_reset_leaves_residuals_of_rounding():
    """Residuals belong to the weight, not to the state. A checkpoint saved after the reset contains them."""
    net, resumed = (nn.Sequential(nn.Linear(3, 16)).bfloat16() for _ in range(2))
    opts = [lomo(model, rule="lion", lr=1e-4, rounding="compensated") for model in (net, resumed)]
    for n in range(6):
        if n == 3:
            opts[0].state.clear()
            opts[1].load_state_dict(opts[0].state_dict())
            resumed.load_state_dict(net.state_dict())
        for opt, model in zip(opts, (net, resumed), strict=True):
            opt.backward(model((DATA + n).bfloat16()).float().square().mean())
    assert same(weights(net), weights(resumed))
    state = opts[0].named_state_dict()["state"]["0.weight"]
    assert (state["residual"] != 0).float().mean() > 0.9


# -- the life of an optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_cannot_be_copied(copied):
    opt = lomo(make_net())
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled.*opt\.state_dict\(\)"):
        copied(opt)


def test_a_removed_optimizer_leaves_no_hook_and_can_be_saved():
    net = make_net()
    opt = lomo(net, rule="adamw")
    opt.backward(loss_of(net))
    saved, before = opt.named_state_dict(), weights(net)
    opt.remove()
    loss_of(net).backward()
    assert same(weights(net), before) and all(param.grad is not None for param in net.parameters())
    after = opt.named_state_dict()
    assert after["step"] == 1
    for name, state in saved["state"].items():
        assert_same(state, after["state"][name])
    with pytest.raises(StepError, match=r"optimizer that was removed by remove\(\)"):
        opt.backward(loss_of(net))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_new_optimizer_replaces_an_unreferenced_one(scheduled):
    """A constructor that raises leaves no hooks behind."""
    net = make_net()
    opt = lowmem.FusedOptimizer(net[2].named_parameters("2"), rule="lomo", lr=0.1)
    if scheduled:
        LambdaLR(opt, lambda step: 1.0)
    with pytest.raises(StepError, match=r"'2\.weight' is already updated by another FusedOptimizer"):
        lomo(net)
    lowmem.FusedOptimizer(net[0].named_parameters("0"), rule="lomo").remove()
    del opt
    lomo(net).backward(loss_of(net))
    assert same(weights(net), ordinary(make_net(), [[0]]))


def test_an_unreferenced_optimizer_is_freed():
    net = make_net()
    opt = lomo(net, rule="adamw", lr=1e-3)
    opt.backward(loss_of(net))
    del opt
    gc.collect()
    loss_of(net).backward()
    assert all(param.grad is not None for param in net.parameters())
    with pytest.warns(UserWarning, match=r"deleted before its first step.*opt = lowmem\.FusedOptimizer"):
        lomo(make_net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lomo(make_net()).remove()


def test_hooks_on_several_threads(monkeypatch):
    """Autograd calls hooks from one thread per device, so updates must not run concurrently."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24)))
    expected = copy.deepcopy(net)
    opt = lomo(net, clip_norm=0.5, policy="deferred", rule="adamw")
    update, active, together, ready = opt._hooks._arrived(), [], [], threading.Barrier(4)

    def watched(record):
        active.append(record.name)
        together.append(len(active))
        update(record)
        active.remove(record.name)

    def backward_of(layers):
        ready.wait()
        for param in layers.parameters():
            param.grad = torch.ones_like(param)
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)

    def backward(loss, **_):
        threads = [threading.Thread(target=backward_of, args=(net[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    monkeypatch.setattr(opt._hooks, "_arrived", lambda: watched)
    monkeypatch.setattr(torch.autograd, "backward", backward)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1, foreach=False)
    plain.param_groups[0]["weight_decay"] = opt.param_groups[0]["weight_decay"]
    for _ in range(3):
        opt.backward(net(torch.ones(1, 8)).sum())
        for param in expected.parameters():
            param.grad = torch.ones_like(param)
        clip_grad_norm_(expected.parameters(), 0.5)
        plain.step()
    assert same(weights(net), weights(expected))
    assert max(together) == 1


def test_a_wrapper_that_imitates_the_class():
    """Lightning's wrapper subclasses its optimizer's class and adds attributes."""

    class Wrapper:
        def __init__(self, optimizer):
            self._optimizer = optimizer
            self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})

        def __getattr__(self, name):
            return getattr(self._optimizer, name)

    net = make_net()
    opt = lomo(net)
    wrapper = Wrapper(opt)
    wrapper.backward(loss_of(net, 0))
    with wrapper.accumulate():
        wrapper.backward(loss_of(net, 1))
    assert opt.policy == wrapper.policy == "deferred"
    wrapper.backward(loss_of(net, 2))
    assert opt.last_step.step == 2
    assert same(weights(net), ordinary(make_net(), [[0], [1, 2]]))
