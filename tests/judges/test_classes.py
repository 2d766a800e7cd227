"""Third-party optimizer classes give bitwise the weights of a plain loop, even when resumed, or raise before an update.

The model has a branch without a gradient in some steps. The plain loop orders parameters by when their gradients are
complete, because fused training draws random numbers in that order.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import random

import pytest
import torch
from judged import judge, report
from support.products import FULL

import lowmem
from lowmem.errors import UnsupportedError

# Without LOWMEM_FULL, only every third class and this share of its switches are tested.
SHARE = 0.1

# Number of equal configurations per package: with all switches, and without LOWMEM_FULL.
EQUAL = {
    "pytorch_optimizer.optimizer": (409, 39),
    "schedulefree": (14, 3),
    "prodigyopt": (0, 0),
    "bitsandbytes.optim": (61, 11),
    "torchao.optim": (12, 2),
    "optimi": (24, 3),
    "lion_pytorch": (2, 1),
    "came_pytorch": (1, 1),
    "adam_mini": (0, 0),
    "galore_torch": (4, 0),
    "apollo_torch": (3, 1),
}

# Required arguments, and arguments that reduce the time from minutes to seconds.
NEEDED = {"num_iterations": 100, "num_data": 100, "lr": 1e-2, "solver_max_iterations": 2, "max_size_triangular": 16}

STEPS = 8


def classes(package):
    """Returns the optimizer classes that a package exports, without duplicates."""
    module = importlib.import_module(package)
    found = [
        value
        for name, value in sorted(vars(module).items())
        if inspect.isclass(value) and name[0] != "_" and not inspect.isabstract(value)
    ]
    base = torch.optim.Optimizer
    own = [cls for cls in found if issubclass(cls, base) and cls.__module__.partition(".")[0] != "torch"]
    return [
        cls for cls in dict.fromkeys(own) if "step" in vars(cls) or any("step" in vars(b) for b in cls.__mro__[1:-2])
    ]


def configurations(cls):
    """Returns the default configuration of a class, and one configuration per changed switch."""
    arguments = inspect.signature(cls).parameters
    usual = {key: value for key, value in NEEDED.items() if key in arguments}
    if "foreach" in arguments:
        usual["foreach"] = False
    switches = {
        key: not argument.default
        for key, argument in arguments.items()
        if isinstance(argument.default, bool) and key != "use_triton"  # exits the process if there is no GPU
    }
    decay = {"weight_decay": 1e-2} if "weight_decay" in arguments else {}
    yield "", usual
    for key, value in switches.items():
        yield f"{key}={value}", {**usual, **decay, key: value}


class Branches(torch.nn.Module):
    """Matrices of 64 by 64 fill the groups of low-bit states. Vectors are included if the class supports them."""

    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(64, 64, bias=bias)
        self.left, self.right = (torch.nn.Linear(64, size, bias=bias) for size in (64, 3))

    def forward(self, x, step):
        hidden = torch.tanh(self.trunk(x))
        parts = [self.left(hidden)] if step % 3 == 1 else [self.left(hidden), self.right(hidden)]
        return sum(part.square().mean() for part in parts)


def grouped(net, cls):
    """Orders parameters by when their gradients are complete, in groups if the class needs to know their kind."""
    named = list(net.named_parameters())[::-1]
    if "use_muon" not in (inspect.getdoc(cls) or ""):
        return named
    kinds = [[item for item in named if (item[1].ndim == 2) is matrices] for matrices in (True, False)]
    return [{"params": kind, "use_muon": use} for kind, use in zip(kinds, (True, False), strict=True) if kind]


def batches():
    source = torch.Generator().manual_seed(1)
    return [
        size * torch.randn(4, 64, generator=source) for size in itertools.islice(itertools.cycle((1, 30, 0.03)), STEPS)
    ]


def plain(cls, settings, bias):
    net = Branches(bias)
    groups = grouped(net, cls)
    if isinstance(groups[0], dict):
        params = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
    else:
        params = [param for _, param in groups]
    optimizer = cls(params, **settings)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step, x in enumerate(batches()):
        optimizer.zero_grad()
        net(x, step).backward()
        torch.manual_seed(step)
        optimizer.step()
    return net


def fused(cls, settings, bias, resumed):
    net = Branches(bias)
    optimizer = lowmem.FusedOptimizer(grouped(net, cls), rule=cls, **settings)
    for step, x in enumerate(batches()):
        if resumed and step == STEPS // 2:
            other = Branches(bias)
            other.load_state_dict(net.state_dict())
            saved, net = optimizer.state_dict(), other
            optimizer = lowmem.FusedOptimizer(grouped(net, cls), rule=cls, **settings)
            optimizer.load_state_dict(saved)
        torch.manual_seed(step)
        optimizer.backward(net(x, step))
    return net


def same(cls, settings, resumed):
    bias = True
    try:
        net = fused(cls, settings, bias, resumed)
    except UnsupportedError as error:
        if "2D" not in str(error):
            raise
        bias = False
        net = fused(cls, settings, bias, resumed)
    others = plain(cls, settings, bias).parameters()
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(net.parameters(), others, strict=True))


def judged(package, share):
    """Returns the verdicts on a package's classes, with their defaults and a random sample of changed switches."""
    verdicts, drawn = {}, random.Random(package)
    with torch.compiler.set_stance("force_eager"), contextlib.redirect_stdout(None):
        for cls in classes(package)[:: 1 if FULL else 3]:
            for name, settings in configurations(cls):
                if not name or drawn.random() < share:
                    compare = functools.partial(same, cls, settings, resumed=not name)
                    verdicts[f"{cls.__name__}({name})"] = judge(compare)
    return verdicts


@pytest.mark.parametrize("package", EQUAL)
def test_every_class(package):
    pytest.importorskip(package.partition(".")[0], reason=f"{package} is not installed: pip install lowmem[judges]")
    report(package, judged(package, 1.0 if FULL else SHARE), EQUAL[package][not FULL])
