"""torch.distributed.checkpoint saves and loads states bitwise, under the model's parameter names."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.nets import data, full_weights
from support.shards import KINDS, everyones, make
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import lowmem
from lowmem import placements
from lowmem.errors import CheckpointError

SETTINGS = {
    "lomo": {"rule": "lomo", "lr": 1e-2},
    "adamw": {"rule": "adamw", "lr": 1e-2, "rounding": "stochastic", "seed": 7},
    "adalomo, loss scale": {"rule": "adalomo", "loss_scale": "dynamic", "policy": "deferred"},
    "scaled_adam": {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 3, "policy": "deferred"},
    "two rules": {"rule": "adamw", "groups": ({"match": "bias|gain|one", "rule": "lans", "lr": 1e-2},)},
}


def optimizer(net, settings):
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)


def steps(net, opt, batches, rank=0, count=1):
    for ids in batches:
        opt.backward(net(ids.tensor_split(count)[rank]))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(), other[key].nan_to_num()), key
        else:
            assert json.dumps(value) == json.dumps(other[key]), key  # DCP turns tuples into lists


def through_dcp(rank, count, kind, settings, folder):
    """Trains, saves and continues; a new model and optimizer load the checkpoint and end with the same bits."""
    batches = list(map(everyones, data()))
    net = KINDS[kind](rank, make)
    opt = optimizer(net, settings)
    steps(net, opt, batches[:4], rank, count)
    saved, at_save = copy.deepcopy(opt.named_state_dict()), full_weights(net)
    states = get_optimizer_state_dict(net, opt)
    trained = {name for name, param in net.named_parameters() if param.requires_grad}
    assert states["state"].keys() >= trained
    assert {name for group in states["param_groups"] for name in group["params"]} >= trained
    assert_same(opt.named_state_dict(), saved)
    dcp.save({"optimizer": states}, checkpoint_id=folder)

    other = KINDS[kind](rank, make)
    for name, param in other.named_parameters():
        placements.fill(param, at_save[name])
    resumed = optimizer(other, settings)
    template = {"optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(template, checkpoint_id=folder)
    set_optimizer_state_dict(other, resumed, template["optimizer"])
    assert all(param.grad is None for param in other.parameters())
    assert_same(full_weights(other), at_save)
    assert_same(resumed.named_state_dict(), saved)
    steps(net, opt, batches[4:7], rank, count)
    steps(other, resumed, batches[4:7], rank, count)
    assert_same(full_weights(net), full_weights(other))
    return saved, at_save


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", list(SETTINGS.values())[2:], ids=list(SETTINGS)[2:])
def test_one_device(settings, tmp_path):
    through_dcp(0, 1, "replicated", settings, tmp_path / "saved")


def on_ranks(rank, kind, settings, folder):
    return through_dcp(rank, dist.get_world_size(), kind, settings, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "settings"), [("replicated", "adamw"), ("fsdp2", "scaled_adam")])
def test_ranks_and_another_number_of_them(two, kind, settings, tmp_path):
    results = two.run(on_ranks, kind, SETTINGS[settings], tmp_path / "saved")
    net = make()
    net.load_state_dict(results[0][1])
    opt = optimizer(net, SETTINGS[settings])
    template = {"optimizer": get_optimizer_state_dict(net, opt)}
    dcp.load(template, checkpoint_id=tmp_path / "saved")
    set_optimizer_state_dict(net, opt, template["optimizer"])
    assert_same(opt.named_state_dict(), results[0][0])


def test_reading_the_state_of_a_new_optimizer_changes_nothing():
    nets = [make(), make()]
    opts = [optimizer(net, SETTINGS["scaled_adam"]) for net in nets]
    before = full_weights(nets[0])
    get_optimizer_state_dict(nets[0], opts[0])
    assert_same(full_weights(nets[0]), before)
    assert not len(opts[0].state)
    for net, opt in zip(nets, opts, strict=True):
        steps(net, opt, list(data())[:4])  # step() is optional
    assert_same(full_weights(nets[0]), full_weights(nets[1]))
    assert_same(opts[0].named_state_dict(), opts[1].named_state_dict())


FULL = {name: settings for name, settings in SETTINGS.items() if name != "lomo"}  # torch raises if there is no state
# not to be mistaken for a plain torch.optim.AdamW, which has the same options
FULL["a class of torch"] = {"rule": "torch.optim.AdamW", "lr": 0.1}


@pytest.mark.parametrize("settings", FULL.values(), ids=FULL)
def test_full_states(settings):
    net, other = make(), make()
    opt, resumed = (optimizer(model, settings) for model in (net, other))
    steps(other, resumed, list(data())[:1])  # the class creates its states in its first step
    steps(net, opt, list(data())[:3])
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(net, opt, options=options), options=options)
    assert_same(resumed.named_state_dict(), opt.named_state_dict())


def test_states_that_cannot_be_loaded_raise(tmp_path):
    net, other = make(), make()
    opts = [lowmem.FusedOptimizer(n.named_parameters(), rule="torch.optim.AdamW", lr=0.1) for n in (net, other)]
    steps(net, opts[0], list(data())[:1])
    dcp.save({"optimizer": get_optimizer_state_dict(net, opts[0])}, checkpoint_id=tmp_path / "saved")
    template = {"optimizer": get_optimizer_state_dict(other, opts[1])}  # dcp.load loads only the keys of the template
    dcp.load(template, checkpoint_id=tmp_path / "saved")
    with pytest.raises(
        CheckpointError, match=r"3 states of .* this optimizer has 0.* creates its states in its first step"
    ):
        set_optimizer_state_dict(other, opts[1], template["optimizer"])
    assert not len(opts[1].state)
    net = make()
    opt = optimizer(net, SETTINGS["adamw"])
    steps(net, opt, list(data())[:1])
    states = get_optimizer_state_dict(net, opt)
    next(net.parameters()).requires_grad_(False)
    with pytest.raises(CheckpointError, match="does not load states of frozen parameters"):
        set_optimizer_state_dict(net, opt, states)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(net, opt, options=flat)
    with pytest.raises((CheckpointError, KeyError)):
        set_optimizer_state_dict(net, opt, states, options=flat)
