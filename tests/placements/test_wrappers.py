"""A model that is wrapped or sharded after its optimizer was created raises before the first update."""

import inspect

import pytest
import torch
from support.shards import engine
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

import lowmem
from lowmem.errors import StepError, UnsupportedError


def ddp(rank, net):
    return torch.nn.parallel.DistributedDataParallel(net)


def sharded(net, *modules):
    for module in modules:
        fully_shard(module)
    return net


def zero1(rank, net):
    return engine(rank, net, stage=1, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


# Changes to a model after its optimizer was created, and the expected error.
LATER = {
    "ddp": (ddp, "Remove the wrapper"),
    "replicate": (lambda rank, net: replicate(net), "Remove the wrapper"),
    "zero1": (zero1, "lowmem frees them in hooks"),
    "zero3": (lambda rank, net: engine(rank, net, stage=3).module, "deepspeed.initialize sharded"),
}
if "_fsdp_orig_uid" in inspect.getsource(_fsdp_param):
    LATER["fsdp2"] = (lambda rank, net: sharded(net, net), "fully_shard sharded")
    LATER["half fsdp2"] = (lambda rank, net: sharded(net, net[1]), "fully_shard sharded")
else:  # torch 2.11 does not mark such a model, whose parameters get no gradients
    LATER["fsdp2"] = (lambda rank, net: sharded(net, net), "or fully_shard was called after the optimizer")


def make():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def wrapped_later(rank, name, passed, placement, plain=False):
    net, (wrap, message) = make(), LATER[name]
    opt = lowmem.FusedOptimizer(
        net.named_parameters(), rule="lomo", lr=0.1, model=net if passed else None, placement=placement
    )
    wrapped = wrap(rank, net)
    local = [getattr(param, "_local_tensor", param) for param in net.parameters() if param.numel()]
    before = [tensor.detach().clone() for tensor in local]
    loss = wrapped(torch.full((2, 3), rank + 1.0)).sum()
    with pytest.raises((UnsupportedError, StepError), match=message):
        loss.backward() if plain else opt.backward(loss)
    assert all(map(torch.equal, local, before))


@pytest.mark.parametrize(("passed", "placement"), [(True, "auto"), (False, "auto"), (False, "local")])
@pytest.mark.parametrize("name", LATER)
def test_nothing_is_updated(two, name, passed, placement):
    two.run(wrapped_later, name, passed, placement)


def plain_backward(rank):
    wrapped_later(rank, "ddp", passed=False, placement="auto", plain=True)


def wrapped_first(rank):
    net = make()
    wrapped = ddp(rank, net)
    for model in (wrapped, net, None):
        with pytest.raises(UnsupportedError, match="Remove the wrapper"):
            lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1, model=model)


def wrapped_after_a_step(rank):
    """The next step raises when it ends."""
    net = make()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1)
    opt.backward(net(torch.ones(1, 3)).sum())
    wrapped = ddp(rank, net)
    with pytest.raises(UnsupportedError, match="Remove the wrapper"):
        opt.backward(wrapped(torch.ones(1, 3)).sum())
    net.zero_grad()
    with pytest.raises(StepError, match="torn"):
        opt.backward(net(torch.ones(1, 3)).sum())


@pytest.mark.parametrize("case", [plain_backward, wrapped_first, wrapped_after_a_step])
def test_wrapping_with_ddp_or_fsdp_raises_at_any_time(two, case):
    two.run(case)


def others_are_wrapped(rank):
    """Sharding a frozen copy of the model and wrapping an unrelated model is allowed."""
    net, raw = make(), torch.nn.Parameter(torch.ones(3))
    reference, discriminator = fully_shard(make()), ddp(rank, make())
    opt = lowmem.FusedOptimizer([*net.named_parameters(), ("raw", raw)], rule="lomo", lr=0.1)
    x = torch.ones(1, 3)
    opt.backward((net(x * raw) + reference(x).detach() + discriminator(x).detach()).sum())
    return len(opt.last_step.names)


def test_other_models_may_be_wrapped_and_sharded(two):
    assert two.run(others_are_wrapped) == [5, 5]
