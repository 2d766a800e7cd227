"""Cases from Accelerate's test scripts and examples, on one process and on two."""

import contextlib
import copy
import importlib.util
import os

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.test_utils import RegressionDataset, RegressionModel
from accelerate.utils import GradientAccumulationPlugin, find_executable_batch_size
from judged import judge, report, untouched_if_refused
from support.products import sample
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

import lowmem

RATE = {"lr": 1e-2, "weight_decay": 1e-2}


def reset():
    """Resets Accelerate's state, which is global."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    reset()


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def make_net(cls=Deep, seed=0):
    torch.manual_seed(seed)
    return cls()


def fused(net, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, rule="adamw", **RATE, **options)


def ordinary(net, **options):
    return torch.optim.AdamW(net.parameters(), foreach=False, **RATE)


def weights(*nets):
    return [param.detach().clone() for net in nets for param in net.parameters()]


def same(one, other):
    return all(map(torch.equal, one, other))


def loss_of(model, batch):
    x, y = (batch[key].float().view(-1, 1) for key in "xy")
    return nn.functional.mse_loss(model(x), y)


def loader_of(length=40, batch_size=4, **options):
    data = RegressionDataset(length=length, seed=5)
    return DataLoader(data, batch_size=batch_size, **options)


class Script:
    """The setup shared by all scripts. On two processes the reference model is wrapped, and ours is not."""

    def __init__(self, make, net, loader, schedule=None, steps=1, plugin=None, wraps=None, options=None, **settings):
        reset()
        plugin = plugin or GradientAccumulationPlugin(num_steps=steps)
        config = DataLoaderConfiguration(**settings)
        self.accelerator = Accelerator(gradient_accumulation_plugin=plugin, dataloader_config=config, cpu=True)
        self.net, self.opt = net, make(net, **options or {})
        scheduler = None if schedule is None else schedule(self.opt)
        wraps = make is ordinary if wraps is None else wraps
        self.model = self.accelerator.prepare_model(net, evaluation_mode=not wraps)
        self.prepared, self.loader = self.accelerator.prepare(self.opt, loader)
        self.scheduler = None if scheduler is None else self.accelerator.prepare(scheduler)

    def train(self, epochs=2, clip_value=None, loader=None, loss=loss_of):
        with untouched_if_refused(self.net):
            for _ in range(epochs):
                for batch in loader or self.loader:
                    with self.accelerator.accumulate(self.model):
                        self.accelerator.backward(loss(self.model, batch))
                        if (
                            clip_value is not None
                            and self.accelerator.sync_gradients
                            and type(self.opt) is torch.optim.AdamW
                        ):
                            self.accelerator.clip_grad_value_(self.model.parameters(), clip_value)
                        self.prepared.step()
                        if self.scheduler is not None:
                            self.scheduler.step()
                        self.prepared.zero_grad()
        return weights(self.net)


def equal(found, want, start):
    """Compares bitwise on one process, and up to the rounding of sums on two."""
    assert not same(want, start)
    if "RANK" not in os.environ:
        return same(found, want)
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, want, strict=True))


def loop(schedule=None, loader=loader_of, net=make_net, options=None, epochs=2, **settings):
    """Compares an unchanged loop with torch's optimizer and with ours."""
    want = Script(ordinary, net(), loader(), schedule, **settings).train(epochs)
    return equal(
        Script(fused, net(), loader(), schedule, options=options, **settings).train(epochs), want, weights(net())
    )


# -- schedules ---------------------------------------------------------------------------------------------------------


def powers(opt):
    return LambdaLR(opt, lambda step: 0.9**step)


def cosine(opt):
    return CosineAnnealingLR(opt, 20)


def one_cycle(opt):
    return OneCycleLR(opt, max_lr=3e-2, total_steps=24)


# -- accumulation ------------------------------------------------------------------------------------------------------


def windows_over_epochs():
    """With sync_with_dataloader=False, 10 batches form windows of 4, and the last 2 join the next epoch's window."""
    plugin = {"num_steps": 4, "sync_with_dataloader": False}
    return loop(powers, plugin=GradientAccumulationPlugin(**plugin), net=lambda: make_net(), epochs=4)


def a_loop_that_breaks():
    """The loop breaks between micro-batches, and zero_grad() drops their gradients."""

    def run(make):
        script = Script(make, make_net(), loader_of(), steps=4)
        for stop in (6, 3, 10):
            for n, batch in enumerate(script.loader):
                if n == stop:
                    break
                with script.accelerator.accumulate(script.model):
                    script.accelerator.backward(loss_of(script.model, batch))
                    script.prepared.step()
                    script.prepared.zero_grad()
            script.opt.zero_grad()
            script.accelerator.step = 0
        return weights(script.net)

    return equal(run(fused), run(ordinary), weights(make_net()))


def evaluated_between():
    """Another loader inside the loop, as for an evaluation between micro-batches."""

    def run(make):
        script = Script(make, make_net(), loader_of(), steps=3)
        others = script.accelerator.prepare(loader_of(length=8))
        losses = []
        for batch in script.loader:
            with script.accelerator.accumulate(script.model):
                with torch.no_grad():
                    losses += [script.accelerator.gather(loss_of(script.model, other)) for other in others]
                script.accelerator.backward(loss_of(script.model, batch))
                script.prepared.step()
                script.prepared.zero_grad()
        return [*weights(script.net), torch.stack(losses)]

    return equal(run(fused), run(ordinary), weights(make_net()))


def weighted_by_tokens():
    """Losses are summed and divided by the tokens of the window, as in transformers' trainer."""

    def run(make):
        script = Script(make, make_net(), loader_of(), steps=3)
        accelerator, batches = script.accelerator, list(script.loader)
        processes = accelerator.num_processes
        for start in range(0, len(batches), 3):
            window = batches[start : start + 3]
            count = accelerator.gather(torch.tensor([sum(len(batch["x"]) - n for n, batch in enumerate(window))])).sum()
            for n, batch in enumerate(window):
                accelerator.gradient_state._set_sync_gradients(n == len(window) - 1)
                with accelerator.no_sync(script.model) if n < len(window) - 1 else contextlib.nullcontext():
                    rows = {key: value[n:] for key, value in batch.items()}
                    loss = loss_of(script.model, rows) * len(rows["x"])
                    accelerator.backward(loss * accelerator.gradient_accumulation_steps * processes / count)
            script.prepared.step()
            script.prepared.zero_grad()
        return weights(script.net)

    return equal(run(fused), run(ordinary), weights(make_net()))


def two_models():
    """A generator and a discriminator with separate optimizers share one accumulate()."""

    def run(make):
        script = Script(make, make_net(), loader_of(), steps=2)
        judge_net = make_net(seed=1)
        other = make(judge_net)
        model = script.accelerator.prepare_model(judge_net, evaluation_mode=make is fused)
        prepared = script.accelerator.prepare(other)
        for batch in script.loader:
            with script.accelerator.accumulate(script.model, model):
                x, y = (batch[key].view(-1, 1) for key in "xy")
                script.accelerator.backward(
                    (model(y) - 1).square().mean() + model(script.model(x).detach()).square().mean()
                )
                prepared.step()
                prepared.zero_grad()
                for param in judge_net.parameters():
                    param.requires_grad_(False)
                script.accelerator.backward((model(script.model(x)) - 1).square().mean())
                script.prepared.step()
                script.prepared.zero_grad()
                for param in judge_net.parameters():
                    param.requires_grad_(True)
        return weights(script.net, judge_net)

    return equal(run(fused), run(ordinary), weights(make_net(), make_net(seed=1)))


def clipped_by_value():
    want = Script(ordinary, make_net(), loader_of(), steps=3).train(clip_value=0.01)
    found = Script(fused, make_net(), loader_of(), steps=3, options={"clip_value": 0.01}).train(clip_value=0.01)
    assert not same(want, Script(ordinary, make_net(), loader_of(), steps=3).train())
    return equal(found, want, weights(make_net()))


def clipped_by_accelerate(function):
    """Accelerate's functions need gradients, which the preceding backward has already used and freed."""
    script = Script(fused, make_net(), loader_of())
    with untouched_if_refused(script.net):
        getattr(script.accelerator, function)(script.model.parameters(), 0.1)
    return False


def backwards_without_accumulate(context):
    """Without accumulate(), the first backward cannot know that others follow, so step() raises."""
    script = Script(fused, make_net(), loader_of(), wraps=False)
    batches = list(script.loader)
    with getattr(script.accelerator, context)(script.model):
        script.accelerator.backward(loss_of(script.model, batches[0]))
    script.accelerator.backward(loss_of(script.model, batches[1]))
    script.prepared.step()
    return False


# -- saving ------------------------------------------------------------------------------------------------------------


def resumed(folder, skip):
    """Resumes from save_state() after an epoch and `skip` batches."""
    settings = {"schedule": powers, "steps": 2}
    want = Script(ordinary, make_net(), loader_of(), **settings).train()
    script = Script(fused, make_net(), loader_of(), **settings)
    script.train(epochs=1)
    if skip:
        for _, batch in zip(range(skip), script.loader, strict=False):
            script.train(1, loader=[batch])
    script.accelerator.save_state(folder)
    script = Script(fused, make_net(seed=9), loader_of(), **settings)
    script.accelerator.load_state(folder)
    rates = [group["lr"] for group in script.opt.param_groups]
    assert rates == script.scheduler.get_last_lr()
    found = script.train(1, loader=skip_first_batches(script.loader, skip))
    return equal(found, want, weights(make_net()))


def continued_by_torch():
    """torch saves the prepared optimizer's state, and it is loaded before prepare()."""
    want = Script(ordinary, make_net(), loader_of()).train(epochs=2)
    script = Script(fused, make_net(), loader_of())
    script.train(epochs=1)
    saved = copy.deepcopy((script.net.state_dict(), script.prepared.state_dict()))

    def make(net, **options):
        net.load_state_dict(saved[0])
        opt = fused(net)
        opt.load_state_dict(saved[1])
        return opt

    return equal(Script(make, make_net(seed=9), loader_of()).train(epochs=1), want, weights(make_net()))


def another_class(path, **options):
    """prepare() wraps a third-party optimizer class."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)

    def plain(net, **_):
        return cls(net.parameters(), **options)

    def ours(net, **_):
        return lowmem.FusedOptimizer(net.named_parameters(), model=net, rule=cls, **options)

    with torch.compiler.set_stance("force_eager"):
        want, found = (Script(make, make_net(Wide), loader_of(), steps=2).train() for make in (plain, ours))
    return equal(found, want, weights(make_net(Wide)))


class Wide(nn.Sequential):
    """Layers large enough for quantized states."""

    def __init__(self):
        super().__init__(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def smaller_batches_after_an_error():
    """`find_executable_batch_size` restarts with a new model and optimizer after an out-of-memory error."""

    def run(make):
        sizes = []

        @find_executable_batch_size(starting_batch_size=8)
        def attempt(batch_size):
            sizes.append(batch_size)
            script = Script(make, make_net(), loader_of(batch_size=batch_size))
            if batch_size > 3:

                def fail(grad):
                    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

                script.net[0].weight.register_hook(fail)
            return script.train()

        found = attempt()
        assert len(sizes) > 2
        return found

    return equal(run(fused), run(ordinary), weights(make_net()))


ONE = {
    "two numbers": lambda: loop(net=lambda: make_net(RegressionModel)),
    "two numbers, accumulated": lambda: loop(powers, net=lambda: make_net(RegressionModel), steps=2),
    "every batch": lambda: loop(powers),
    "windows of 3": lambda: loop(powers, steps=3),
    "windows that go on in the next epoch": windows_over_epochs,
    "sync_each_batch": lambda: loop(powers, plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)),
    "schedule not adjusted": lambda: loop(
        one_cycle, plugin=GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False)
    ),
    "CosineAnnealingLR": lambda: loop(cosine, steps=2),
    "OneCycleLR": lambda: loop(one_cycle, steps=2),
    "shuffled by a seedable sampler": lambda: loop(
        powers, lambda: loader_of(shuffle=True, generator=torch.Generator().manual_seed(3)), use_seedable_sampler=True
    ),
    "batches of other sizes": lambda: loop(powers, lambda: loader_of(length=13), steps=2),
    "a loop that breaks": a_loop_that_breaks,
    "evaluated between micro-batches": evaluated_between,
    "weighted by tokens": weighted_by_tokens,
    "two models": two_models,
    "clip_grad_value_ by clip_value": clipped_by_value,
    "clip_grad_value_ after backward": lambda: clipped_by_accelerate("clip_grad_value_"),
    "clip_grad_norm_ after backward": lambda: clipped_by_accelerate("clip_grad_norm_"),
    "no_sync without accumulate, at step()": lambda: backwards_without_accumulate("no_sync"),
    "trigger_sync_in_backward without accumulate, at step()": lambda: backwards_without_accumulate(
        "trigger_sync_in_backward"
    ),
    "continued by torch": continued_by_torch,
    "find_executable_batch_size": smaller_batches_after_an_error,
}


OTHERS = ["torchao.optim.AdamW8bit", "optimi.AdamW", "lion_pytorch.Lion"]


def test_one_process(tmp_path):
    cases = {
        **ONE,
        **{
            path: lambda path=path: another_class(path, lr=1e-3)
            for path in OTHERS
            if importlib.util.find_spec(path.partition(".")[0]) is not None
        },
        "resumed after an epoch": lambda: resumed(tmp_path / "epoch", 0),
        "resumed in an epoch": lambda: resumed(tmp_path / "batches", 4),
    }
    verdicts = {name: judge(compare) for name, compare in cases.items()}
    report("Accelerate's scripts on one process", verdicts, at_least=len(cases) - 4)


# -- two processes -----------------------------------------------------------------------------------------------------

ENVIRONMENT = {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def multiple_forwards():
    """Three forwards without synchronization precede three backwards, the last of which averages the sums."""

    def run(make):
        script = Script(make, make_net(), loader_of(length=48))
        accelerator, batches = script.accelerator, list(script.loader)
        for start in range(0, len(batches), 3):
            with accelerator.no_sync(script.model):
                *losses, last = [loss_of(script.model, batch) for batch in batches[start : start + 3]]
            for loss in losses:
                with script.opt.accumulate() if make is fused else contextlib.nullcontext():
                    accelerator.backward(loss)
            with accelerator.trigger_sync_in_backward(script.model):
                accelerator.backward(last)
            script.prepared.step()
            script.prepared.zero_grad()
        return weights(script.net)

    return equal(run(fused), run(ordinary), weights(make_net()))


def wrapped(**settings):
    """prepare() wraps the model."""
    Script(fused, make_net(), loader_of(), wraps=True, **settings).train()
    return False


def joined():
    """join_uneven_inputs needs the wrapper. With 3 rows, one process gets two batches and the other gets one."""
    script = Script(fused, make_net(), loader_of(length=3, batch_size=1), wraps=True, even_batches=False)
    with script.accelerator.join_uneven_inputs([script.model]):
        script.train()
    return False


def averaged_seldom():
    script = Script(fused, make_net(), loader_of(), wraps=True)
    with LocalSGD(accelerator=script.accelerator, model=script.model, local_sgd_steps=2):
        script.train()
    return False


def compressed():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    script = Script(fused, make_net(), loader_of(), wraps=True)
    script.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    script.train()
    return False


def agreed(net):
    """Returns whether both ranks have the same weights."""
    script = Script(fused, net, loader_of(), steps=2)
    script.train()
    both = script.accelerator.gather(torch.cat([param.detach().view(1, -1) for param in net.parameters()], 1))
    return torch.equal(both[0], both[1]) and script.opt.placement == "replicated"


def different_models(rank):
    """Each rank has a different seed. The wrapper would broadcast the weights of rank 0."""
    Script(fused, make_net(seed=rank), loader_of()).train()
    return False


def broadcast(rank):
    want = Script(ordinary, make_net(seed=rank), loader_of()).train()
    found = Script(fused, make_net(seed=rank), loader_of(), options={"placement": "replicated"}).train()
    return equal(found, want, weights(make_net(seed=rank)))


TWO = {
    "every batch": lambda rank: loop(powers),
    "windows of 3": lambda rank: loop(powers, steps=3),
    "two numbers": lambda rank: loop(powers, net=lambda: make_net(RegressionModel), steps=2),
    "batches are split": lambda rank: loop(powers, split_batches=True, steps=2),
    "batches are dispatched": lambda rank: loop(powers, dispatch_batches=True, steps=2),
    "batches are split and dispatched": lambda rank: loop(powers, split_batches=True, dispatch_batches=True),
    "sync_each_batch": lambda rank: loop(powers, plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)),
    "windows that go on in the next epoch": lambda rank: windows_over_epochs(),
    "OneCycleLR": lambda rank: loop(one_cycle, steps=2),
    "a number of rows that is not even": lambda rank: loop(powers, lambda: loader_of(length=13)),
    "batches of other sizes on each rank": lambda rank: loop(
        powers, lambda: loader_of(length=15, batch_size=4), even_batches=False
    ),
    "evaluated between micro-batches": lambda rank: evaluated_between(),
    "weighted by tokens": lambda rank: weighted_by_tokens(),
    "two models": lambda rank: two_models(),
    "clip_grad_value_ by clip_value": lambda rank: clipped_by_value(),
    "forwards first": lambda rank: multiple_forwards(),
    "ranks agree": lambda rank: agreed(make_net()),
    "weights of rank 0": broadcast,
    "weights of each rank": different_models,
    "DistributedDataParallel": lambda rank: wrapped(),
    "DistributedDataParallel, accumulated": lambda rank: wrapped(steps=2),
    "DistributedDataParallel, joined": lambda rank: joined(),
    "DistributedDataParallel, LocalSGD": lambda rank: averaged_seldom(),
    "DistributedDataParallel, a communication hook": lambda rank: compressed(),
}


def on_a_rank(rank, case, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **ENVIRONMENT}
    try:
        return judge(lambda: resumed(folder, 2) if case == "resumed in an epoch" else TWO[case](rank))
    finally:
        reset()
        for name in ("RANK", "LOCAL_RANK", *ENVIRONMENT):
            os.environ.pop(name)


def test_two_processes(two, tmp_path):
    verdicts = {}
    for case in [*sample(TWO, 1 / 2), "resumed in an epoch"]:
        verdicts[case], (other, _) = two.run(on_a_rank, case, str(tmp_path))
        assert verdicts[case][0] == other, case
    report("Accelerate's scripts on two processes", verdicts, at_least=len(verdicts) - 6)
