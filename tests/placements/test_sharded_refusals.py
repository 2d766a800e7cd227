"""With sharded parameters, unsupported setups raise an error, and a failed backward does not affect the next one."""

from contextlib import nullcontext

import pytest
import torch
from support.nets import Chain, full_weights, plain_step
from support.shards import SHARDS, engine, make, make_wide

import lowmem
from lowmem.errors import StepError, UnsupportedError


def engine_with_optimizer(rank):
    net = make()
    owner = engine(rank, net, stage=3, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="DeepSpeed has an optimizer for these parameters"):
        lowmem.FusedOptimizer(net.named_parameters(), model=net)
    owner.destroy()


def two_passes(rank):
    for shard in SHARDS.values():
        net = shard(rank, make)
        with pytest.raises(UnsupportedError, match=r"sharded parameters would be gathered.*policy='deferred'"):
            lowmem.FusedOptimizer(net.named_parameters(), model=net, clip_norm=1.0, policy="two_pass")
        assert lowmem.FusedOptimizer(net.named_parameters(), model=net, clip_norm=1.0).policy == "deferred"


def still_gathered(rank):
    """Gathered FSDP2 parameters would look like unsharded ones. They are accepted again after `reshard()`."""
    from torch.distributed.fsdp import FSDPModule

    net = SHARDS["fsdp2"](rank, make)
    with torch.no_grad():
        net(torch.ones(2, 5, dtype=torch.int64))  # no backward follows that would reshard the last parameters
    with pytest.raises(UnsupportedError, match=r"reshard\(\)"):
        lowmem.FusedOptimizer([("embed", net.embed)], lr=0.1)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert lowmem.FusedOptimizer([("embed", net.embed)], model=net, lr=0.1).placement == "fsdp2"


def in_another_dimension(rank):
    from torch.distributed.tensor import Shard

    net = SHARDS["fsdp2"](rank, make_wide, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    with pytest.raises(UnsupportedError, match="dimension 0"):
        lowmem.FusedOptimizer(net.named_parameters(), model=net)


def without_reducing(rank):
    net = SHARDS["fsdp2"](rank, make)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=0.1)
    for module in (net.seldom, net):  # one module may skip its reduction, but not all of them
        module.set_requires_gradient_sync(False)
        with (
            nullcontext() if module is not net else pytest.raises(StepError, match=r"set_requires_gradient_sync\(False")
        ):
            opt.backward(net(torch.ones(2, 5, dtype=torch.int64)))
    net.set_requires_gradient_sync(True)
    opt.backward(net(torch.ones(2, 5, dtype=torch.int64)))
    assert opt.last_step.step == 2


def some_whole(rank):
    net = SHARDS["fsdp2"](rank, make)
    whole = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedError, match="some parameters are sharded by fsdp2 and others are not"):
        lowmem.FusedOptimizer([*net.named_parameters(), ("whole", whole)], model=net)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net)
    with pytest.raises(UnsupportedError, match="its placement is replicated, but earlier groups have fsdp2"):
        opt.add_param_group({"params": [("whole", whole)]})
    for placement in ("local", "zero3"):
        with pytest.raises(lowmem.LowmemError, match="sharded by fsdp2"):
            lowmem.FusedOptimizer(net.named_parameters(), model=net, placement=placement)
    with pytest.raises(lowmem.LowmemError, match="shard the model first"):
        lowmem.FusedOptimizer([whole], placement="fsdp2")


@pytest.mark.parametrize(
    "case",
    [engine_with_optimizer, two_passes, still_gathered, in_another_dimension, without_reducing, some_whole],
)
def test_unsupported_setups_raise(two, case):
    two.run(case)


def make_chain():
    return Chain(*(torch.nn.Linear(8, 8) for _ in range(3)))


def fail(module, inputs, output):
    output.register_hook(lambda grad: 1 / 0)


def dies_and_goes_on(rank, kind, plain):
    net = SHARDS[kind](rank, make_chain)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule="lomo", lr=0.1, batching=False)

    def step():
        loss = net(torch.ones(2, 8))
        loss.backward() if plain else opt.backward(loss)

    step()
    hook = net.layers[0].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        step()
    hook.remove()
    for _ in range(2):
        with pytest.raises(StepError, match="torn"):
            step()
    opt.accept_torn_step()
    before = full_weights(net)
    step()
    return [name for name, weight in full_weights(net).items() if torch.equal(weight, before[name])]


def dies_before_the_first_gradient(rank, kind, plain):
    """None of the optimizer's hooks has been called, so the step is not torn."""
    net, reference = SHARDS[kind](rank, make_chain), make_chain()
    reference.load_state_dict(full_weights(net))
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule="lomo", lr=0.1)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for fails in (False, True, False, False):
        hook = net.layers[-1].register_forward_hook(fail if fails else lambda *_: None)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            loss = net(torch.ones(2, 8))
            loss.backward() if plain else opt.backward(loss)
        hook.remove()
        if not fails:
            plain_step(sgd, reference(torch.ones(2, 8)))
        torch.testing.assert_close(full_weights(net), full_weights(reference))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", SHARDS)
def test_a_failed_backward_does_not_affect_the_next_one(two, kind, plain):
    assert two.run(dies_and_goes_on, kind, plain) == [[], []]
    two.run(dies_before_the_first_gradient, kind, plain)
