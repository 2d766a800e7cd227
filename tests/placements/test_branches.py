"""Ranks that take different branches of a model match one device, and gradients do not wait for missing ones."""

import random

import pytest
import torch
from support.nets import LAYERS, Layers, Memory
from support.products import FULL, pairwise

import lowmem
from lowmem.errors import StepError
from lowmem.placements.replicated import _ARRIVED, _by_arrival

MIB = 1 << 20
BODY = tuple(range(1, 7))
HEADS = [[(*BODY, 0)] * 2 if step % 2 else [(*BODY, 7)] * 2 for step in range(6)]
EXPERT = [[(0, 1, 2, 7), (0, 1, 3, 7)], [(0, 1, 2, 7), (0, 1, 4, 7)], [(0, 1, 5, 7), (0, 1, 7)], [(0, 1, 7)] * 2]


def layer_drop():
    source = random.Random(3)
    paths = [[tuple(n for n in range(LAYERS) if source.random() < 0.6) or (0,) for _ in range(2)] for _ in range(8)]
    return [[tuple(range(LAYERS))] * 2, *paths]


APART = [[(0, 1), (7, 6, 5, 4, 3, 2)]] * 6  # neither rank sees the whole order
PATHS = {"alternating heads": HEADS, "layer drop": layer_drop(), "experts": EXPERT, "apart": APART}
SHORT = [[(0, 1, 2), (2, 1, 0)], [(0, 3), (1, 2)], [(3,), (3, 0, 1, 2)], [(1, 0), (0, 1)]]
ORDERS = {**PATHS, "short and unlike": SHORT}


def as_one_device(rank, steps, settings, checkpointed):
    """Trains steps that are each a path per rank, or a list of micro-batches of such paths."""
    net = Layers(checkpointed=checkpointed)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1, **settings)
    reference = Layers()
    reference.load_state_dict(net.state_dict())
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in steps:
        micro_batches = step if isinstance(step[0], list) else [step]
        sgd.zero_grad()
        for paths in micro_batches:
            (sum(map(reference, paths)) / len(paths)).backward()
        sgd.step()
        for paths in micro_batches[:-1]:
            with opt.accumulate():
                opt.backward(net(paths[rank]))
        opt.backward(net(micro_batches[-1][rank]))
        arrived = [name for name, param in reference.named_parameters() if param.grad is not None]
        assert list(opt.last_step.names) == arrived
        torch.testing.assert_close(net.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)
    return [param.detach() for param in net.parameters()]


POLICIES = [("immediate", False), ("two_pass", False), ("deferred", False), ("immediate", True), ("deferred", True)]


@pytest.mark.parametrize(("order", "policy", "batching"), pairwise(ORDERS, POLICIES, [False, True]), ids=str)
def test_equal_to_one_device(two, order, policy, batching):
    """Ranks must start all-reduces in one order: if they started them as gradients arrive, averages of equal shape
    would be mixed up without an error. Reentrant checkpointing is included."""
    policy, checkpointed = policy
    one, other = two.run(as_one_device, ORDERS[order], {"policy": policy, "batching": batching}, checkpointed)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "reentrant"])
def test_a_gradient_of_an_earlier_micro_batch_only(two, checkpointed):
    """Its sum is averaged although the last micro-batch's graph lacks the parameter on one rank or on all."""
    last = [(0, 1, 7), (0, 1, 7)]
    steps = [[[(0, 1, 2, 3, 7), (0, 4, 1, 7)], last], [[(0, 1, 5, 7), (0, 1, 7)], [(0, 1, 7), (0, 6, 7)]], [last, last]]
    one, other = two.run(as_one_device, [*steps, *steps], {"policy": "deferred"}, checkpointed)
    assert all(map(torch.equal, one, other))


def sums_in_float32(rank):
    """Rank 0 accumulates layer 1 twice, rank 1 once, and only rank 0 has gradients for layer 2."""
    net = Layers().bfloat16()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1, policy="deferred")
    before = [layer.weight.detach().clone() for layer in net.layers]
    grads = [torch.randn(4, 4, dtype=torch.bfloat16) for _ in range(4)]

    def loss(*pairs):
        return sum((net.layers[n].weight * grad).sum().float() for n, grad in pairs)

    with opt.accumulate():
        opt.backward(loss((1, grads[0]), (2, grads[1])) if rank == 0 else loss((0, grads[2])))
    opt.backward(loss((1, grads[2])) if rank == 0 else loss((1, grads[3])))
    means = [grads[2].float() / 2, (grads[0].float() + grads[2].float() + grads[3].float()) / 2, grads[1].float() / 2]
    for n, mean in enumerate(means):
        expected = (before[n].float() - 0.1 * mean).bfloat16()
        torch.testing.assert_close(net.layers[n].weight.detach(), expected, rtol=0, atol=2**-8)
    return net.state_dict()


def test_sums_have_one_dtype_on_all_ranks(two):
    one, other = two.run(sums_in_float32)
    assert all(torch.equal(one[name], other[name]) for name in one)


def peaks(rank, steps, settings):
    """Returns the temporary memory of each step's backward at its peak, in gradients of 4 MiB."""
    net = Layers(1024)
    for layer in net.layers:
        torch.nn.init.eye_(layer.weight)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=1e-6, **settings)
    results = []
    for step in steps:
        micro_batches = step if isinstance(step[0], list) else [step]
        for paths in micro_batches[:-1]:
            with opt.accumulate():
                opt.backward(net(paths[rank]))
        loss = net(micro_batches[-1][rank])
        with Memory(net, opt, loss) as memory:
            opt.backward(loss)
        del loss
        results.append(memory.above / (4 * MIB))
    return results


FEW = 3.3  # two gradients, one that a gloo thread has not released yet, and temporaries of a tile


@pytest.mark.filterwarnings("ignore:Expected a tensor")
@pytest.mark.parametrize("paths", PATHS if FULL else ["layer drop", "apart"])
def test_gradients_do_not_wait_for_missing_ones(two, paths):
    """Once the order is learned, one is in flight while the next is computed. Waiting would store all eight."""
    for results in two.run(peaks, PATHS[paths][:6], {}):
        assert max(results[2:]) <= FEW


def test_parameters_without_a_gradient_keep_their_place_in_the_order():
    numbers = dict.fromkeys("xabcde", 0) | {"d": _ARRIVED + 1, "a": _ARRIVED + 2, "b": _ARRIVED}
    assert _by_arrival(numbers, "xabcde") == [*"xdeabc"]


class Silent(torch.autograd.Function):
    """Returns no gradient for its weight."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Half(Layers):
    """The last layer of a path is part of the graph but gets no gradient."""

    def forward(self, path):
        x = torch.ones(1, self.size)
        for n in path[:-1]:
            x = self.layers[n](x)
        return (x if path[-1] is None else Silent.apply(x, self.layers[path[-1]].weight)).square().sum()


def train_without_some(rank, steps):
    net = Half()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="adamw", lr=0.1, weight_decay=0.1)
    for paths in steps:
        opt.backward(net(paths[rank]))
    return [param.detach() for param in net.parameters()], list(opt.last_step.names)


@pytest.mark.parametrize(
    "steps", [[[(0, 1, 5), (0, 2, None)]] * 3, [[(0, 1, None)] * 2, [(0, 1, 5)] * 2]], ids=["on one rank", "later"]
)
def test_a_parameter_reached_without_a_gradient_is_not_reduced(two, steps):
    (one, names), (other, others) = two.run(train_without_some, steps)
    assert all(map(torch.equal, one, other))
    assert "layers.5.weight" not in names + others
    torch.manual_seed(0)  # the seed of every rank
    assert torch.equal(one[5], Half().layers[5].weight)


def zeros_for_no_gradient(rank):
    with pytest.raises(StepError, match="Return zeros instead of None"):
        train_without_some(rank, [[(0, 1, None)] * 2, [(0, 1, 5), (0, 1, None)]])


def test_gradients_that_the_graph_does_not_show_raise(two):
    two.run(zeros_for_no_gradient)
