"""In a process group, placement "auto" refuses ranks whose parameters differ and leaves them as they were."""

import pytest
import torch
import torch.distributed as dist

import lowmem
from lowmem.errors import UnsupportedError


def layers(count, dtype=torch.float32):
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=dtype) for _ in range(count)))


def other_values(rank):
    torch.manual_seed(rank)
    return layers(2).named_parameters()


def one_element(rank):
    net = layers(2)
    net[1].weight.data[3, 3] += 1e-7 * rank
    return net.named_parameters()


def two_exchanged(rank):
    net = layers(1)
    if rank:
        net[0].weight.data[0, 0:2] = net[0].weight.data[0, 0:2].flip(0).clone()
    return net.named_parameters()


def stages(rank):
    return layers(2 + rank).named_parameters()


def more_groups(rank):
    return [{"params": list(layer.named_parameters(prefix=str(n)))} for n, layer in enumerate(layers(1 + rank))]


def other_names(rank):
    return layers(1).named_parameters(prefix=f"stage{rank}")


def other_dtypes(rank):
    return layers(1, torch.bfloat16 if rank else torch.float32).named_parameters()


DIFFERENT = {
    other_values: "rank 1 have other values",
    one_element: "rank 1 have other values",
    two_exchanged: "rank 1 have other values",
    stages: r"rank 0 has 4 parameter\(s\) and rank 1 has 6",
    more_groups: r"rank 0 has 2 parameter\(s\) and rank 1 has 4",
    other_names: "rank 1 have other names, shapes or dtypes",
    other_dtypes: "rank 1 have other names, shapes or dtypes",
}


def refused(rank, make, message):
    params = list(make(rank))
    tensors = [pair for item in params for pair in (item["params"] if isinstance(item, dict) else [item])]
    before = [param.detach().clone() for _, param in tensors]
    with pytest.raises(UnsupportedError, match=message) as caught:
        lowmem.FusedOptimizer(params, rule="lomo", lr=0.1)
    assert "placement='replicated'" in str(caught.value)
    assert "placement='local'" in str(caught.value)
    for (_, param), values in zip(tensors, before, strict=True):
        assert torch.equal(param.detach(), values)
    lowmem.FusedOptimizer(params, rule="lomo", lr=0.1, placement="local").remove()


@pytest.mark.parametrize(("make", "message"), DIFFERENT.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_parameters_that_differ_are_refused(two, make, message):
    two.run(refused, make, message)


def a_group_that_differs(rank):
    net = layers(1)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1)
    torch.manual_seed(rank)
    with pytest.raises(UnsupportedError, match="rank 1 have other values"):
        opt.add_param_group({"params": list(layers(1).named_parameters(prefix="late"))})
    opt.backward(net(torch.ones(1, 4)).sum())
    return [param.detach() for param in net.parameters()]


def test_a_group_that_is_added_later(two):
    one, other = two.run(a_group_that_differs)
    assert all(map(torch.equal, one, other))


def named_replicated(rank):
    torch.manual_seed(rank)
    net = layers(2)
    lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1, placement="replicated")
    return [param.detach() for param in net.parameters()]


def test_replicated_broadcasts_the_weights_of_rank_0(two):
    torch.manual_seed(0)
    expected = [param.detach() for param in layers(2).parameters()]
    for weights in two.run(named_replicated):
        assert all(map(torch.equal, weights, expected))


def equal_params(rank):
    opt = lowmem.FusedOptimizer(layers(2).named_parameters(), rule="lomo", lr=0.1)
    assert dist.get_world_size() == 2
    return opt.placement


def test_equal_parameters_are_replicated(two):
    assert two.run(equal_params) == ["replicated", "replicated"]


def in_a_trainer(rank, folder):
    from transformers import TrainingArguments

    from lowmem.trainer import FusedTrainer

    torch.manual_seed(rank)  # as a classification head that is not in the checkpoint
    net = layers(1)
    args = TrainingArguments(folder, use_cpu=True, report_to="none", save_strategy="no")
    trainer = FusedTrainer(net, args, fused=lowmem.FusedConfig(rule="lomo", lr=1e-2))
    trainer.create_optimizer()
    return trainer.optimizer.placement, net[0].weight.detach()


def test_a_trainer_broadcasts(two, tmp_path, monkeypatch):
    (placement, one), (_, other) = two.run(in_a_trainer, tmp_path)
    assert placement == "replicated"
    assert torch.equal(one, other)
