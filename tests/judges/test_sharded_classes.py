"""Optimizer classes of other packages on two ranks that share the parameters: as on one device, or refused.

Both ranks have the same batch, so that the average of their gradients is exact. What is left is that an element may be
computed by vector code on one side and by scalar code on the other.
"""

import functools
import inspect

import pytest
import torch
from judged import REFUSED, judge, report
from support.products import FULL
from support.shards import SHARDS
from test_classes import classes, configurations

import lowmem
from lowmem import placements

# How many classes of each package are known to be equal, under ZeRO-3 and under FSDP2. Without LOWMEM_FULL a
# tenth is trained, each under one of them, in turn.
EQUAL = {
    "pytorch_optimizer.optimizer": 52,
    "schedulefree": 6,
    "bitsandbytes.optim": 16,
    "torchao.optim": 0,
    "optimi": 7,
    "lion_pytorch": 1,
    "came_pytorch": 0,
}


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = torch.nn.Linear(64, 65), torch.nn.Linear(65, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x))).square().mean()


def train(net, cls):
    usual = next(settings for _, settings in configurations(cls))
    optimizer = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule=cls, **usual)
    source = torch.Generator().manual_seed(1)
    for step in range(4):
        torch.manual_seed(step)
        optimizer.backward(net(torch.randn(4, 64, generator=source)))
    return {name: placements.full_tensor(param).clone() for name, param in net.named_parameters()}


def refuse_early(cls):
    """Raises what an optimizer of sharded parameters would, on one device and without training."""
    rule, usual = lowmem.rules.resolve(cls), next(settings for _, settings in configurations(cls))
    group = {**rule.defaults, **usual, "params": list(Small().parameters())}
    rule.check(group)
    rule.adopt(group, sharded=True)


def same(cls, kind, rank):
    ours, alone = train(SHARDS[kind](rank, Small), cls), train(Small(), cls)
    return all(torch.allclose(weight, alone[name], rtol=1e-4, atol=1e-6) for name, weight in ours.items())


def candidates(package):
    """Classes that do not want to know which of their parameters are matrices."""
    return [cls for cls in classes(package) if "use_muon" not in (inspect.getdoc(cls) or "")]


def judged_early(package):
    """The verdict on each class of a package before it is trained."""
    with torch.compiler.set_stance("force_eager"):
        return {cls: judge(lambda cls=cls: refuse_early(cls) is None) for cls in candidates(package)}


def verdicts(rank, kind, classes):
    with torch.compiler.set_stance("force_eager"):
        return {cls: judge(functools.partial(same, cls, kind, rank)) for cls in classes}


@pytest.mark.parametrize("package", EQUAL)
def test_every_class(two, package):
    pytest.importorskip(package.partition(".")[0], reason=f"{package} is not installed: pip install lowmem[judges]")
    early = judged_early(package)
    found = [cls for cls, (verdict, _) in early.items() if verdict != REFUSED]
    trained = {}
    for n, kind in enumerate(SHARDS):
        first, second = two.run(verdicts, kind, found if FULL else found[n :: 10 * len(SHARDS)])
        assert [verdict for verdict, _ in first.values()] == [verdict for verdict, _ in second.values()]
        trained |= first
        each = {cls.__name__: verdict for cls, verdict in {**early, **trained}.items() if cls in trained or FULL}
        report(f"{package} up to {kind}", each, EQUAL[package] - len(found) + len(trained))
