"""Third-party optimizer classes on two ranks that share the parameters train as on one device, or raise.

Both ranks have the same batch, so that averaging their gradients is exact. The remaining difference is that an element
may be computed by vector instructions on one side and by scalar instructions on the other.
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

# Number of equal classes per package under ZeRO-3 and FSDP2. Without LOWMEM_FULL, one class in ten is trained,
# alternating between the two.
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
    """Raises the errors of an optimizer of sharded parameters on one device and without training."""
    rule, usual = lowmem.rules.resolve(cls), next(settings for _, settings in configurations(cls))
    group = {**rule.defaults, **usual, "params": list(Small().parameters())}
    rule.check(group)
    rule.adopt(group, sharded=True)


def same(cls, kind, rank):
    ours, alone = train(SHARDS[kind](rank, Small), cls), train(Small(), cls)
    return all(torch.allclose(weight, alone[name], rtol=1e-4, atol=1e-6) for name, weight in ours.items())


def candidates(package):
    """Returns classes that do not need to know which of their parameters are matrices."""
    return [cls for cls in classes(package) if "use_muon" not in (inspect.getdoc(cls) or "")]


def judged_early(package):
    """Returns the verdict on each class of a package before training."""
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
