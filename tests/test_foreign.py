"""Any torch optimizer as a rule: the same bits as its own step(), or a refusal that says why."""

import copy
import inspect

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import lowmem
from lowmem.errors import ConfigError, UnsupportedError

REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
SETTINGS = [
    pytest.param(info.optim_cls, setting.kwargs, id=f"{info.optim_cls.__name__}-{setting.desc}")
    for info in optim_db
    if info.optim_cls not in REFUSED
    for setting in info.optim_inputs_func(device="cpu")
]


def small_model(cls):
    bias = cls is not torch.optim.Muon  # which takes matrices only
    return torch.nn.Sequential(torch.nn.Linear(6, 5, bias=bias), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=bias))


def single_tensor(cls):
    """What makes a class step parameter by parameter, as fused training does."""
    return {"foreach": False} if "foreach" in inspect.signature(cls).parameters else {}


@pytest.mark.parametrize(("cls", "kwargs"), SETTINGS)
def test_same_bits_as_step(cls, kwargs):
    fused, plain = (small_model(cls) for _ in range(2))
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    ours = lowmem.FusedOptimizer(fused.named_parameters(), rule=cls, **single_tensor(cls), **kwargs)
    theirs = cls(plain.parameters(), **single_tensor(cls), **copy.deepcopy(kwargs))
    for _ in range(3):
        x = torch.randn(4, 6)
        ours.backward(fused(x).square().mean())
        plain(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", ["torch.optim.AdamW", torch.optim.AdamW])
def test_class_and_import_path(rule):
    param = torch.nn.Parameter(torch.zeros(3))
    opt = lowmem.FusedOptimizer([param], rule=rule, betas=(0.5, 0.9))
    assert opt.rule.name.endswith("AdamW")
    assert opt.param_groups[0]["lr"] == 1e-3  # the class's own default
    assert opt.param_groups[0]["betas"] == (0.5, 0.9)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        closure()


class CountsInGroup(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1


class ChangesGroup(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (NeedsClosure, "needs a closure"),
        (torch.optim.SparseAdam, "sparse gradients only"),
    ],
)
def test_class_refused(cls, message):
    with pytest.raises(UnsupportedError, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=cls)


@pytest.mark.parametrize(("cls", "key"), [(CountsInGroup, "new keys"), (ChangesGroup, "lr")])
def test_state_in_the_group_refused(cls, key, give_gradients):
    param = torch.nn.Parameter(torch.zeros(3))
    opt = lowmem.FusedOptimizer([("w", param)], rule=cls, lr=0.1)
    with pytest.raises(UnsupportedError, match=rf"'w'.*keeps state in its parameter group \({key}\)"):
        give_gradients(opt, (param, torch.ones(3)))


def test_muon_names_the_vector():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match=r"parameter 'bias' of shape \[4\].*Muon does not accept this"):
        lowmem.FusedOptimizer(model.named_parameters(), rule=torch.optim.Muon)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [({"lr": -1.0}, "learning rate"), ({"betas": (2.0, 0.9)}, "beta parameter"), ({"eps": -1.0}, "epsilon")],
)
def test_value_that_the_class_refuses(hyper, message):
    with pytest.raises(UnsupportedError, match=f"AdamW does not accept this: Invalid {message}"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule="torch.optim.AdamW", **hyper)


def test_unknown_option_of_a_class():
    with pytest.raises(ConfigError, match="Did you mean 'betas'"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule="torch.optim.AdamW", beta=(0.9, 0.9))


def test_loss_scale_refused():
    with pytest.raises(UnsupportedError, match="bfloat16 without a loss scale"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule="torch.optim.AdamW", loss_scale=1024)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_rounding_of_a_class(rounding, give_gradients):
    """A bfloat16 weight with a float32 copy for the step stays within one rounding of a float32 weight."""
    start = torch.randn(8, 8).bfloat16()
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    opt = lowmem.FusedOptimizer([("w", ours)], rule="torch.optim.SGD", lr=0.1, rounding=rounding)
    sgd = torch.optim.SGD([theirs], lr=0.1)
    grad = torch.randn(8, 8).bfloat16()
    give_gradients(opt, (ours, grad))
    theirs.grad = grad.float()
    sgd.step()
    # stochastic rounding may go either way: one spacing, 2⁻⁷ of the value's power of two; nearest half of it
    limit = {"stochastic": 2**-7, "compensated": 2**-8}[rounding]
    assert ((ours.float() - theirs).abs() <= limit * theirs.abs()).all()
    assert not torch.equal(ours, start)
