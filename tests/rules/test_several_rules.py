"""Several rules in one optimizer: each group has its rule, but clipping, accumulation and the loss scale are shared."""

import functools

import pytest
import torch
from support.devices import seeded
from support.nets import TwoLayers, plain_step, same, weights

import lowmem
from lowmem.errors import ConfigError
from lowmem.rules import Lomo

Net = functools.partial(TwoLayers, 9, 7, 5)


def split(net):
    """Returns groups: matrices with AdamW, vectors with LOMO."""
    named = list(net.named_parameters())
    matrices, vectors = ([(n, p) for n, p in named if (p.ndim == 2) == wide] for wide in (True, False))
    return [
        {"params": matrices, "rule": "adamw", "lr": 3e-2, "weight_decay": 0.1},
        {"params": vectors, "rule": "lomo", "lr": 5e-2},
    ]


def batches():
    source = seeded(1)
    return [torch.randn(4, 9, generator=source) for _ in range(6)]


def test_a_third_party_optimizer_next_to_a_rule():
    """Weights are bitwise equal to weights of two torch optimizers with common clipping."""
    net, plain = Net(), Net()
    matrices, vectors = split(net)
    vectors = {**vectors, "rule": torch.optim.Adagrad, "foreach": False}
    options = {"model": net, "clip_norm": 0.05, "policy": "deferred", "compile": False}
    opt = lowmem.FusedOptimizer([matrices, vectors], **options)
    params = {ndim: [param for param in plain.parameters() if param.ndim == ndim] for ndim in (1, 2)}
    adamw = torch.optim.AdamW(params[2], lr=3e-2, weight_decay=0.1, foreach=False)
    adagrad = torch.optim.Adagrad(params[1], lr=5e-2, foreach=False)
    for rows in batches():
        opt.backward(net(rows))
        plain(rows).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, foreach=False)
        plain_step(adamw)
        plain_step(adagrad)
    assert same(weights(net), weights(plain))


def test_an_omitted_option_is_the_default_of_the_groups_rule():
    net = Net()
    matrices, vectors = (group["params"] for group in split(net))
    groups = [{"params": matrices}, {"params": vectors, "rule": "lion", "rounding": "stochastic"}]
    opt = lowmem.FusedOptimizer(groups, rule="adamw", lr=0.5, betas=(0.8, 0.9))
    first, second = opt.param_groups
    assert (first["rule"], first["lr"], first["betas"], first["rounding"]) == ("adamw", 0.5, (0.8, 0.9), "auto")
    lion = lowmem.rules.Lion.defaults
    assert (second["rule"], second["lr"], second["betas"]) == ("lion", lion["lr"], lion["betas"])
    assert second["rounding"] == "stochastic" and "eps" not in second


def test_a_group_that_is_added_later():
    """The group gets no options of the default rule, and its gradients count for the clipping norm."""
    net = Net()
    matrices, vectors = split(net)
    opt = lowmem.FusedOptimizer([matrices], rule="adamw", clip_norm=0.05, policy="deferred")
    opt.add_param_group(vectors)
    defaults = {name for name in opt.param_groups[1] if name in lowmem.rules.AdamW.defaults}
    assert defaults == {"lr", "weight_decay"}
    opt.backward(net(batches()[0]))
    assert len(opt.last_step.names) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "lommo"}, "rule 'lommo' is unknown. Did you mean 'lomo'"),
        ({"betas": (0.9, 0.9)}, "parameter group 1: rule 'lomo' has no hyperparameter 'betas'"),
        ({"match": "bias"}, "parameter group 1: rule 'lomo' has no hyperparameter 'match'"),
        ({"weight_decy": 0.1}, "parameter group 1: rule 'lomo' has no .*Did you mean 'weight_decay'"),
        ({"lr": -1.0}, "parameter group 1: lr=-1.0 is not valid"),
        ({"weight_decay": -1.0}, "parameter group 1: weight_decay=-1.0 is not valid"),
        ({"rounding": "up"}, "parameter group 1: rounding 'up' is unknown"),
        ({"state_storage": "int3"}, "parameter group 1: state_storage 'int3' is unknown"),
    ],
)
def test_a_wrong_group_is_named(change, message):
    net = Net()
    groups = split(net)
    groups[1] |= change
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer(groups)
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def test_groups_by_name():
    """Trainers and YAML files define groups by expressions. The first one that matches a name takes the parameter."""
    groups = ({"match": r"bias$", "rule": "lomo", "lr": 5e-2}, {"match": "last", "weight_decay": 0.5})
    config = lowmem.FusedConfig(rule="adamw", lr=3e-2, groups=groups)
    net = Net()
    opt = lowmem.FusedOptimizer.from_config(net.named_parameters(), config, model=net)
    assert [(g["rule"], g["param_names"], g["lr"], g["weight_decay"]) for g in opt.param_groups] == [
        ("adamw", ["first.weight"], 3e-2, 0.01),
        ("lomo", ["first.bias", "last.bias"], 5e-2, 0.0),
        ("adamw", ["last.weight"], 3e-2, 0.5),
    ]
    other = Net()
    same = lowmem.FusedOptimizer(other.named_parameters(), rule="adamw", lr=3e-2, groups=groups)
    assert [g["param_names"] for g in same.param_groups] == [g["param_names"] for g in opt.param_groups]
    with pytest.raises(ConfigError, match=r"Pass model\.named_parameters"):
        lowmem.FusedOptimizer(other.parameters(), rule="adamw", groups=groups)
    missing = lowmem.FusedConfig(groups=({"match": "norm"},))
    with pytest.raises(ConfigError, match=r"groups\[0\]: match='norm' matches no parameter that is not already in"):
        missing.param_groups(net.named_parameters())
    with pytest.raises(ConfigError, match=r"groups\[0\]: .*regular expression"):
        lowmem.FusedConfig(groups=({"match": "("},))
    with pytest.raises(ConfigError, match=r"groups\[0\]: rule 'lomo' has no hyperparameter 'beta'"):
        lowmem.FusedConfig(groups=({"match": "x", "rule": "lomo", "beta": 1},))


def sgd_called(name, times):
    """Returns a class with this name that subtracts lr * times * gradient."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data -= times * group["lr"] * param.grad

    def __init__(self, params, lr=1.0):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr})

    return type(name, (torch.optim.Optimizer,), {"__init__": __init__, "step": step})


class Times(Lomo):
    """Scales the gradient by `times`, an attribute rather than a hyperparameter."""

    name = "times"

    def __init__(self, times):
        self.times = times

    def scalars(self, hyper, step):
        return super().scalars({**hyper, "lr": hyper["lr"] * self.times}, step)


one, two, times = sgd_called("One", 1), sgd_called("Two", 2), Times(2)
SAME_NAME = {
    "classes": (sgd_called("Called", 1), sgd_called("Called", 2)),
    "instances": (Times(1), Times(2)),
    "a name and an instance": ("lomo", type("Lomo2", (Lomo,), {})()),
}


@pytest.mark.parametrize("case", SAME_NAME)
def test_two_rules_with_one_name_raise(case):
    first, second = SAME_NAME[case]
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [param], "rule": rule} for param, rule in zip(params, (first, second), strict=True)]
    with pytest.raises(ConfigError, match=r"parameter group 1: its rule has the same name .* Rename one"):
        lowmem.FusedOptimizer(groups)
    opt = lowmem.FusedOptimizer(groups[:1])
    with pytest.raises(ConfigError, match="parameter group 1: its rule has the same name"):
        opt.add_param_group(groups[1])
    opt.backward(params[0].sum())
    assert len(opt.param_groups) == 1 and len(opt.named_state_dict()["param_groups"]) == 1


SHARED = {
    "two classes": (one, two, (0.0, -1.0)),
    "one instance": (times, times, (-1.0, -1.0)),
    "equal instances": (Times(2), Times(2), (-1.0, -1.0)),
}


@pytest.mark.parametrize("case", SHARED)
def test_each_group_is_updated_by_its_rule(case):
    first, second, values = SHARED[case]
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [param], "rule": rule, "lr": 1.0} for param, rule in zip(params, (first, second), strict=True)]
    opt = lowmem.FusedOptimizer(groups)
    opt.backward(sum(param.sum() for param in params))
    assert [param.tolist() for param in params] == [[value] * 3 for value in values]
