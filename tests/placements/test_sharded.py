"""Ranks that share the parameters, by ZeRO-3 or FSDP2, are one device with all of their data."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from nets import ROWS, Net, data
from ranks import Ranks
from shards import SHARDS
from torch.distributed._tools.mem_tracker import MemTracker

import lowmem
from lowmem import checkpoint, placements
from lowmem.errors import UnsupportedError
from lowmem.rules.rule import TABLE
from lowmem.weights import load_weights, save_weights


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n} ranks")
def ranks(request):
    started = Ranks(request.param)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def two():
    started = Ranks(2)
    yield started
    started.stop()


def make():
    torch.manual_seed(0)
    return Net(scalar=(1,))  # neither engine takes a parameter without dimensions


def everyones(ids):
    """All ranks take the same branches: those that take others would wait for one another, whatever the optimizer."""
    ids[:, 0] = ids[0, 0]
    return ids


def train(net, rows_of, settings, micro_batches=1):
    opt = lowmem.FusedOptimizer(net.named_parameters(), **{"lr": 1e-2, **settings})
    for ids in map(everyones, data()):
        parts = rows_of(ids).tensor_split(micro_batches)
        for n, part in enumerate(parts, start=1):

            def loss(part=part):
                return net(part) / micro_batches

            with opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(loss if opt.replay == "forward" else loss())
    report = opt.last_step
    whole = opt._placement.whole
    return {
        "weights": {name: whole(param).clone() for name, param in net.named_parameters()},
        "told": (report.step, report.names, report.grad_norm.item()),
        "factor": None if report.clip_factor is None else report.clip_factor.item(),
        "placement": opt._placement.name,
    }


def shared(rank, kind, settings, micro_batches=1, options=None):
    net = SHARDS[kind](rank, make, **options or {})
    return train(net, lambda ids: ids.tensor_split(dist.get_world_size())[rank], settings, micro_batches)


def assert_as_one_device(found, kind, settings, micro_batches=1):
    alone = train(make(), lambda ids: ids, settings, micro_batches)
    for rank in found:
        assert rank["placement"] == kind
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, found[0]["weights"][name]), name
            # sums over rows and elements are taken in another order
            torch.testing.assert_close(weight, alone["weights"][name], rtol=1e-5, atol=1e-5, msg=name)
        assert rank["told"][:2] == alone["told"][:2]
        assert rank["told"][2] == pytest.approx(alone["told"][2], rel=1e-4)
        assert (rank["factor"] is None) == (alone["factor"] is None)
        assert alone["factor"] is None or rank["factor"] == pytest.approx(alone["factor"], rel=1e-4)


RULES = [*sorted(TABLE), "torch.optim.AdamW"]
OPTIONS = {
    "adafactor": {
        "min_dim_size_to_factor": 3,
        "factor_map": [("convolution.weight", ["ROW", "NONE", "COLUMN", "COLUMN"]), (".*", "HEURISTIC")],
    }
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", SHARDS)
def test_every_rule(ranks, kind, rule):
    settings = {"rule": rule, "lr": 1e-3 if rule == "lion" else 1e-2, **OPTIONS.get(rule, {})}
    assert_as_one_device(ranks.run(shared, kind, settings), kind, settings)


POLICIES = {
    "two_pass": {"policy": "two_pass", "clip_norm": 0.5},
    "forward replay": {"replay": "forward", "clip_norm": 0.5},
    "deferred": {"policy": "deferred", "clip_norm": 0.5},
    "on disk": {"policy": "deferred", "clip_norm": 0.5, "store": "disk"},
    "dynamic scale": {"clip_norm": 0.5, "loss_scale": "dynamic"},
    "largest element": {"clip_norm": 0.05, "norm_type": float("inf"), "clip_value": 0.1},
    "its own clipping": {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 3},
    "not batched": {"rule": "adamw", "batching": False},
}


@pytest.mark.parametrize("settings", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", SHARDS)
def test_every_policy(ranks, kind, settings):
    assert_as_one_device(ranks.run(shared, kind, settings), kind, settings)


def accumulated(rank, kind, settings):
    """A row a micro-batch."""
    return shared(rank, kind, settings, micro_batches=ROWS // dist.get_world_size())


@pytest.mark.parametrize("settings", [{"clip_norm": 0.5}, {"loss_scale": "dynamic", "sums": "gradient"}], ids=str)
@pytest.mark.parametrize("kind", SHARDS)
def test_accumulation(ranks, kind, settings):
    settings = {"policy": "deferred", **settings}
    assert_as_one_device(ranks.run(accumulated, kind, settings), kind, settings)


# -- optimizers from elsewhere, states ---------------------------------------------------------------------------------


def refused(rank, kind, rule, hyper):
    net = SHARDS[kind](rank, make)
    with pytest.raises(UnsupportedError, match=r"needs whole matrices.*'replicated'.*torch.optim.AdamW"):
        lowmem.FusedOptimizer(net.named_parameters(), rule=rule, **hyper)


@pytest.mark.parametrize("rule", ["torch.optim.Adafactor", "torch.optim.Muon"])
@pytest.mark.parametrize("kind", SHARDS)
def test_optimizers_of_whole_matrices_are_refused(two, kind, rule):
    two.run(refused, kind, rule, {})


@pytest.mark.parametrize(
    ("rule", "hyper"),
    [("torch.optim.SGD", {"momentum": 0.9}), ("torch.optim.Adamax", {}), ("torch.optim.RMSprop", {"centered": True})],
)
@pytest.mark.parametrize("kind", SHARDS)
def test_elementwise_optimizers(two, kind, rule, hyper):
    settings = {"rule": rule, "lr": 1e-3, **hyper}
    assert_as_one_device(two.run(shared, kind, settings), kind, settings)


def steps(net, opt, batches, rank, count):
    for ids in batches:
        opt.backward(net(ids.tensor_split(count)[rank]))


def continued(rank, kinds, settings, before):
    """Five steps; then another model, under the next kind, goes on from weights and state."""
    batches, count = list(map(everyones, data())), dist.get_world_size()
    net = SHARDS[kinds[0]](rank, make)
    opt = lowmem.FusedOptimizer(net.named_parameters(), **settings)
    if before is not None:
        fill(net, opt, before["weights"])
        opt.load_state_dict(before["state"])
    else:
        steps(net, opt, batches[:5], rank, count)
    state = opt.state_dict()
    weights = {name: opt._placement.whole(param).clone() for name, param in net.named_parameters()}
    other = SHARDS[kinds[1]](rank, make)
    resumed = lowmem.FusedOptimizer(other.named_parameters(), **settings)
    fill(other, resumed, weights)
    resumed.load_state_dict(state)
    steps(other, resumed, batches[5:], rank, count)
    return weights, state, {name: resumed._placement.whole(param) for name, param in other.named_parameters()}


def fill(net, opt, weights):
    for name, param in net.named_parameters():
        opt._placement.fill(param, weights[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "adalomo", "rounding": "compensated"},
        {"rule": "adamw", "lr": 1e-2},
        {"rule": "lans", "multi_precision": True, "lr": 1e-2},
        {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 3, "policy": "deferred"},
        {"rule": "torch.optim.AdamW", "lr": 1e-2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [("zero3", "fsdp2"), ("fsdp2", "zero3"), ("zero3", "zero3")], ids="-".join)
def test_states_are_whole_and_fit_elsewhere(ranks, kinds, settings):
    """State of one placement continues in another, and on one device, as if nothing had happened."""
    found = ranks.run(continued, kinds, settings, None)
    batches = list(map(everyones, data()))
    net = make()
    opt = lowmem.FusedOptimizer(net.named_parameters(), **settings)
    steps(net, opt, batches[:5], 0, 1)
    reference, (weights, state, _) = opt.state_dict(), found[0]
    shapes = {name: {k: getattr(v, "shape", None) for k, v in kept.items()} for name, kept in state["state"].items()}
    assert shapes == {
        name: {k: getattr(v, "shape", None) for k, v in kept.items()} for name, kept in reference["state"].items()
    }
    fill(net, opt, weights)
    opt.load_state_dict(state)
    steps(net, opt, batches[5:], 0, 1)
    for name, param in net.named_parameters():
        for rank in found:
            torch.testing.assert_close(rank[2][name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)


# -- what DeepSpeed may be told ----------------------------------------------------------------------------------------

ZERO3_OPTIONS = {
    "nothing stays gathered": {"stage3_param_persistence_threshold": 0},
    "some stay gathered": {"stage3_param_persistence_threshold": 20},
    "everything stays gathered": {"stage3_param_persistence_threshold": 10**9},
    "on the host": {"offload_param": {"device": "cpu"}},
    "nothing prefetched": {"stage3_prefetch_bucket_size": 0},
    "hierarchical": {"zero_hpz_partition_size": 1},
    "made whole": {"built_whole": True},
}


@pytest.mark.parametrize("options", ZERO3_OPTIONS.values(), ids=ZERO3_OPTIONS)
@pytest.mark.parametrize("settings", [{"rule": "adalomo"}, {"rule": "adamw", "clip_norm": 0.5}], ids=str)
def test_zero3_as_it_is_configured(two, options, settings):
    assert_as_one_device(two.run(shared, "zero3", settings, 1, options), "zero3", settings)


class Wide(torch.nn.Module):
    """Slices of a MiB or more: smaller ones DeepSpeed does not put into files."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3))
        self.embed = torch.nn.Embedding(512, 1024)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(x @ self.embed.weight.T, ids)  # tied


def make_wide():
    torch.manual_seed(0)
    return Wide()


def three_steps(net, rows_of, settings):
    opt = lowmem.FusedOptimizer(net.named_parameters(), **settings)
    for step in range(3):
        opt.backward(net(rows_of(torch.arange(6) * 17 + step)))
    whole = opt._placement.whole
    return {name: whole(param).clone() for name, param in net.named_parameters()}


def in_files(rank, settings, folder):
    offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 8, "buffer_size": 2**20}
    net = SHARDS["zero3"](rank, make_wide, offload_param=offload)
    kept_in = {str(param.ds_tensor.final_location) for param in net.parameters()}
    return three_steps(net, lambda ids: ids.tensor_split(2)[rank], settings), kept_in


@pytest.fixture
def asynchronous_io(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed puts parameters into files with libaio, which is not here")
    AsyncIOBuilder().load(verbose=False)  # compiled once, before ranks need it


@pytest.mark.parametrize("settings", [{"rule": "adalomo"}, {"rule": "lans", "clip_norm": 0.5}], ids=str)
def test_zero3_in_files(two, asynchronous_io, settings, tmp_path):
    alone = three_steps(make_wide(), lambda ids: ids, settings)
    for weights, kept_in in two.run(in_files, settings, str(tmp_path)):
        assert any("nvme" in place for place in kept_in)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-5, msg=name)


# -- memory ------------------------------------------------------------------------------------------------------------


class Deep(torch.nn.Module):
    """Eight layers of 4 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


NOTHING_EARLY = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_reuse_distance")
BARE = {"zero3": dict.fromkeys(NOTHING_EARLY, 0), "fsdp2": {}}  # DeepSpeed holds what it computes with


def peak_of(action, *held):
    """Bytes of tensors at most while `action` runs, and after it."""
    tracker = MemTracker()
    tracker.track_external(*held)
    with warnings.catch_warnings(action="ignore"), tracker:
        action()
    most, rest = (tracker.get_tracker_snapshot(kind)[torch.device("cpu")] for kind in ("peak", "current"))
    return most["Total"], rest["Total"]


def drop(param):
    param.grad = None


def peaks(rank, kind, settings, folder):
    """Of a step above what stays, of one in which gradients are dropped in the hook; of saving and loading."""
    net = SHARDS[kind](rank, Deep, **BARE[kind])
    pieces = [getattr(param, "ds_tensor", param) for param in net.parameters()]
    x = torch.ones(1, 1024)

    def floor_step():
        net(x).backward()
        for param in net.parameters():
            placements.release(param)

    hooks = [param.register_post_accumulate_grad_hook(drop) for param in net.parameters()]
    floor_step()
    floor, _ = peak_of(floor_step, net, *pieces)
    for hook in hooks:
        hook.remove()
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-3, **settings)

    def step():
        opt.backward(net(x))

    def save():
        save_weights(net, folder / "weights", write=rank == 0)
        checkpoint.save_optimizer(opt, folder / "optimizer.safetensors", write=rank == 0)

    def load():
        load_weights(net, folder / "weights")
        checkpoint.load_optimizer(opt, folder / "optimizer.safetensors")

    step()
    weights = sum(piece.to_local().nbytes if kind == "fsdp2" else piece.nbytes for piece in pieces)
    most, rest = peak_of(step, net, opt, *pieces)
    others = {}
    for name, action in (("saving", save), ("loading", load)):
        others[name] = peak_of(action, net, opt, *pieces)[0]
        dist.barrier()
    return floor - weights, most - rest, weights, most, others


@pytest.mark.parametrize("settings", [{"rule": "lomo"}, {"rule": "adalomo"}, {"rule": "adamw"}], ids=str)
@pytest.mark.parametrize("kind", SHARDS)
def test_memory_is_pieces_what_the_engine_gathers_and_one_gradient(two, kind, settings, tmp_path):
    """Above a step that drops its gradients in the hook: a piece of one, and a tile's temporaries on a CPU."""
    piece, tiles = 2 << 20, 3 << 20
    for floor, above, weights, most, others in two.run(peaks, kind, settings, tmp_path):
        assert weights == 16 << 20  # half of them
        if kind == "zero3":
            assert floor <= 8.1 * 2**20  # one parameter gathered, one gradient
        assert above <= floor + piece + tiles
        assert others["saving"] <= most
        assert others["loading"] <= most


@pytest.mark.parametrize("kind", SHARDS)
def test_a_store_holds_pieces(two, kind, tmp_path):
    for floor, above, weights, _, _ in two.run(peaks, kind, {"rule": "lomo", "policy": "deferred"}, tmp_path):
        assert weights - (1 << 20) <= above <= floor + weights + (1 << 20)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def poisoned(rank, kind, policy):
    net = SHARDS[kind](rank, make)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="adamw", policy=policy, loss_scale="dynamic")
    before = {name: placements.whole(param).clone() for name, param in net.named_parameters()}
    ids = torch.ones(2, 5, dtype=torch.int64)

    def loss():
        return net(ids) * (torch.inf if rank == 1 else 1.0)

    opt.backward(loss if opt.replay == "forward" else loss())
    moved = {n for n, param in net.named_parameters() if not torch.equal(placements.whole(param), before[n])}
    return opt.last_step.skipped, moved, opt.state_dict()["step"], opt.loss_scale, len(opt.last_step.nonfinite)


@pytest.mark.parametrize("policy", ["two_pass", "deferred", "immediate"])
@pytest.mark.parametrize("kind", SHARDS)
def test_an_overflow_on_one_rank_is_everyones(two, kind, policy):
    one, other = two.run(poisoned, kind, policy)
    assert one == other
    skipped, moved, step, scale, nonfinite = one
    assert not moved
    assert (skipped, scale) == (nonfinite, 2.0**15)
    assert step == (policy == "immediate")


def engine_with_optimizer(rank):
    import deepspeed

    SHARDS["zero3"](rank, make)  # has everything initialised
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    net = make()
    engine = deepspeed.initialize(model=net, config=config, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))[0]
    with pytest.raises(UnsupportedError, match="DeepSpeed has an optimizer for these parameters"):
        lowmem.FusedOptimizer(net.named_parameters())
    engine.destroy()


def test_an_engine_with_an_optimizer_is_refused(two):
    two.run(engine_with_optimizer)


def mics(rank):
    net = SHARDS["zero3"](rank, make)
    next(net.parameters()).comm = None
    with pytest.raises(UnsupportedError, match="MiCS"):
        lowmem.FusedOptimizer(net.named_parameters())


def test_mics_is_refused(two):
    two.run(mics)


def graph_replay(rank):
    net = SHARDS["zero3"](rank, make)
    with pytest.raises(UnsupportedError, match=r"replay='graph'.*replay='forward'"):
        lowmem.FusedOptimizer(net.named_parameters(), clip_norm=1.0, policy="two_pass", replay="graph")


def test_graph_replay_is_refused_under_zero3(two):
    two.run(graph_replay)


def still_gathered(rank):
    from torch.distributed.fsdp import FSDPModule

    net = SHARDS["fsdp2"](rank, make)
    with torch.no_grad():
        net(torch.ones(2, 5, dtype=torch.int64))  # nothing follows that would cut the last parameters again
    opt = lowmem.FusedOptimizer([("embed", net.embed)], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"reshard\(\)"):
        opt.backward(net(torch.ones(2, 5, dtype=torch.int64)))
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    opt.remove()
    assert lowmem.FusedOptimizer([("embed", net.embed)], lr=0.1).placement == "fsdp2"


def test_gathered_parameters_of_fsdp2_are_refused(two):
    """They are taken for whole ones, and forgotten when they are cut again."""
    two.run(still_gathered)


def in_another_dimension(rank):
    from torch.distributed.tensor import Shard

    net = SHARDS["fsdp2"](rank, make_wide, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    with pytest.raises(UnsupportedError, match="dimension 0"):
        lowmem.FusedOptimizer(net.named_parameters())


def test_other_dimensions_are_refused(two):
    two.run(in_another_dimension)


def some_whole(rank):
    net = SHARDS["fsdp2"](rank, make)
    whole = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedError, match="some parameters are sharded by fsdp2 and others not at all"):
        lowmem.FusedOptimizer([*net.named_parameters(), ("whole", whole)])
    opt = lowmem.FusedOptimizer(net.named_parameters())
    with pytest.raises(UnsupportedError, match="placement replicated, those before it in fsdp2"):
        opt.add_param_group({"params": [("whole", whole)]})
    for placement in ("local", "zero3"):
        with pytest.raises(lowmem.LowmemError, match="sharded by fsdp2"):
            lowmem.FusedOptimizer(net.named_parameters(), placement=placement)
    with pytest.raises(lowmem.LowmemError, match="shard the model first"):
        lowmem.FusedOptimizer([whole], placement="fsdp2")


def test_a_mixture_is_refused(two):
    two.run(some_whole)
