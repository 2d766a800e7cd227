"""DeepSpeed's tests of user-called backwards, under ZeRO-3 on two ranks and compared with one device.

A second pass through the same graph (`torch.autograd.grad`, then `backward`) is not tested. DeepSpeed gathers
parameters for only one pass, so with any optimizer torch raises an error about released parameters.
"""

import contextlib
import functools

import pytest
import torch
from judged import DIFFERENT, EQUAL, REFUSED, report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem import placements
from lowmem.errors import LowmemError

deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed")

from support.products import sample  # noqa: E402
from support.shards import zero3  # noqa: E402 (it needs deepspeed)

WIDTH, ROWS, STEPS = 8, 8, 5
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 1e-2}  # a large eps limits noise


class TwoLayers(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def block(self, x):
        return torch.relu(self.first(x))

    def forward(self, x):
        if self.reentrant is None:
            return self.second(self.block(x))
        return self.second(checkpoint(self.block, x, use_reentrant=self.reentrant))


class FrozenNorm(TwoLayers):
    """A frozen parameter inside a recomputed block."""

    def __init__(self, reentrant):
        super().__init__(reentrant)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)

    def block(self, x):
        return super().block(self.norm(x))


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH).requires_grad_(False) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = checkpoint(
                lambda x, norm=norm, layer=layer: torch.relu(layer(norm(x))), x, use_reentrant=self.reentrant
            )
        return x


class Adapter(nn.Module):
    """A frozen matrix next to a trained adapter of rank two."""

    def __init__(self, reentrant):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(lambda x: self.base(x) + self.up(self.down(x)), x, use_reentrant=self.reentrant))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return self.left(x), self.right(x)


class OfTwoOutputs(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block, self.head = TwoOutputs(), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(lambda x: sum(self.block(x)), x, use_reentrant=self.reentrant))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.branches[0](x) + self.branches[1](x))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x, heads=(0, 1)):
        x = torch.tanh(self.trunk(x))
        return [self.heads[n](x) for n in heads]


class Repeated(TwoLayers):
    def forward(self, x):
        return self.second(self.first(torch.tanh(self.second(self.first(x)))))


class Tied(nn.Module):
    """The weight of the embedding is also read outside its module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ids = x.argmax(-1, keepdim=True)
        return (torch.tanh(self.layer(self.embed(ids))) @ self.embed.weight.T).squeeze(1)


class TiedModules(nn.Module):
    """Two modules share one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.layer(self.embed(x.argmax(-1)))))


class Run:
    """A model and its optimizer: torch's on one device, or ours on a rank, which gets some of the rows."""

    def __init__(self, nets, rank=None, rule="torch.optim.AdamW", apart=False, **settings):
        self.nets, self.rank, self.released = nets, rank, True
        named = [(f"{n}.{name}", param) for n, net in enumerate(nets) for name, param in net.named_parameters()]
        groups = (
            [[item for item in named if item[0].startswith(f"{n}.")] for n in range(len(nets))] if apart else [named]
        )
        if rank is None:
            self.opts = [torch.optim.AdamW([param for _, param in group], **OPTIONS, foreach=False) for group in groups]
        else:
            self.opts = [lowmem.FusedOptimizer(group, rule=rule, **OPTIONS, **settings) for group in groups]
        self.named = dict(named)

    @property
    def net(self):
        return self.nets[0]

    def rows(self, step, count=ROWS, grad=False):
        source = torch.Generator().manual_seed(100 + step)
        x, y = torch.randn(count, WIDTH, generator=source), torch.randint(WIDTH, (count,), generator=source)
        if self.rank is not None:
            x, y = x.tensor_split(2)[self.rank], y.tensor_split(2)[self.rank]
        return x.clone().requires_grad_(grad), y

    def micro(self):
        """Returns a context for every backward of a step except the last."""
        contexts = contextlib.ExitStack()
        for opt in self.opts if self.rank is not None else ():
            contexts.enter_context(opt.accumulate())
        return contexts

    def step(self):
        for opt in self.opts:
            opt.step()
            opt.zero_grad()

    def weights(self):
        return {name: placements.full_tensor(param).clone() for name, param in self.named.items()}


def released(net):
    """Returns whether all parameters are released, except those that DeepSpeed keeps gathered."""
    return all(param.ds_persist or param.ds_status.name == "NOT_AVAILABLE" for param in net.parameters())


def persistent(net):
    return all(param.ds_status.name == "AVAILABLE" for param in net.parameters() if param.ds_persist)


# -- loops -------------------------------------------------------------------------------------------------------------


def scalar(run, step):
    x, y = run.rows(step)
    cross_entropy(run.net(x), y).backward()
    run.step()


def scalar_of_input(run, step):
    """Reentrant checkpointing requires an input with a gradient."""
    x, y = run.rows(step, grad=True)
    cross_entropy(run.net(x), y).backward()
    run.step()


def through_opt(run, step):
    """Calls `opt.backward` with a function that computes the loss."""
    x, y = run.rows(step, grad=True)
    if run.rank is None:
        cross_entropy(run.net(x), y).backward()
    else:
        run.opts[0].backward(lambda: cross_entropy(run.net(x), y))
    run.step()


def tensor(run, step, grad=True):
    """Runs the backward of a tensor with an explicit gradient."""
    x, _ = run.rows(step, grad=grad)
    found = run.net(x)
    found.backward(torch.linspace(-1, 1, WIDTH).expand_as(found) / len(found))
    run.step()


def micro_batches(run, step, counts=(4,), grad=False):
    """Runs several backwards per step. Between them, all parameters that DeepSpeed would release must be released."""
    count = counts[step % len(counts)]
    for n in range(count):
        x, y = run.rows(10 * step + n, grad=grad)
        with run.micro() if n < count - 1 else contextlib.nullcontext():
            (cross_entropy(run.net(x), y) / count).backward()
        run.released &= run.rank is None or released(run.net)
    run.step()


def varying(run, step):
    micro_batches(run, step, counts=(1, 3, 2))


def without_input_gradient(run, step):
    micro_batches(run, step, counts=(2,))


def several_models(run, step):
    """Runs one backward of the weighted losses of three models."""
    x, y = run.rows(step)
    sum(cross_entropy(net(x), y) / n for n, net in enumerate(run.nets, start=1)).backward()
    run.step()


def several_micro_batches(run, step):
    for n in range(2):
        x, y = run.rows(10 * step + n)
        with run.micro() if n == 0 else contextlib.nullcontext():
            sum(cross_entropy(net(x), y) / 2 for net in run.nets).backward()
        run.released &= run.rank is None or all(map(released, run.nets))
    run.step()


def evaluated_between(run, step):
    """Evaluates before each backward and once after it."""
    for n in range(2):
        x, y = run.rows(10 * step + n)
        loss = cross_entropy(run.net(x), y) / 2
        with torch.no_grad():
            run.net(x)
        with run.micro() if n == 0 else contextlib.nullcontext():
            loss.backward()
        with torch.no_grad():
            run.net(x)
    run.step()


def two_forwards(run, step):
    x, y = run.rows(step)
    losses = [cross_entropy(run.net(x), y), 0.5 * run.net(x + 1).square().mean()]
    with run.micro():
        losses[0].backward()
    losses[1].backward()
    run.step()


def one_head(run, step):
    """The other head does not have a gradient in this step."""
    x, y = run.rows(step)
    cross_entropy(run.net(x, heads=(step % 2,))[0], y).backward()
    run.step()


def a_head_for_each_micro_batch(run, step):
    for n in (0, 1):
        x, y = run.rows(10 * step + n)
        with run.micro() if n == 0 else contextlib.nullcontext():
            (cross_entropy(run.net(x, heads=(n,))[0], y) / 2).backward()
    run.step()


def gradient_of_the_input(run, step):
    """Calls torch.autograd.grad on a separate forward, as for adversarial examples."""
    x, y = run.rows(step, grad=True)
    (direction,) = torch.autograd.grad(cross_entropy(run.net(x), y) * len(x) / ROWS, x)
    cross_entropy(run.net((x + 0.5 * direction).detach()), y).backward()
    run.step()


def edited(run, step):
    """Changes the weights between two steps, as with GatheredParameters."""
    scalar(run, step)
    if step == 2:
        params = list(run.net.parameters())
        gather = (
            contextlib.nullcontext() if run.rank is None else deepspeed.zero.GatheredParameters(params, modifier_rank=0)
        )
        with gather, torch.no_grad():
            if not run.rank:
                for param in params:
                    param.mul_(0.5)


def scored(run, step):
    """A frozen model contributes to the loss, and an extra forward is an evaluation."""
    x, _ = run.rows(step)
    model, teacher = run.nets
    with torch.no_grad():
        target = teacher(x).softmax(-1)
    loss = cross_entropy(model(x), target) + 0.1 * teacher(model(x)).square().mean()
    with torch.no_grad():
        model(x)
    loss.backward()
    run.step()


def clipped(run, step):
    """Clipping needs the norm of all gradients before the first update."""
    x, y = run.rows(step)
    if run.rank is None:
        (5 * cross_entropy(run.net(x), y)).backward()
        nn.utils.clip_grad_norm_(run.net.parameters(), 0.5)
    else:
        run.opts[0].backward(5 * cross_entropy(run.net(x), y))
    run.step()


def scaled_by_torch(run, step):
    """A GradScaler scales the loss."""
    x, y = run.rows(step)
    torch.amp.GradScaler("cpu").scale(cross_entropy(run.net(x), y)).backward()
    run.step()


# Model, loop, and further arguments.
CASES = {
    "a scalar": (TwoLayers, scalar),
    "a scalar, by the function": (TwoLayers, through_opt),
    "a tensor": (TwoLayers, tensor),
    "a tensor without a gradient of the input": (TwoLayers, functools.partial(tensor, grad=False)),
    "4 micro-batches": (TwoLayers, micro_batches),
    "4 micro-batches, persistent": (TwoLayers, micro_batches, {"stage3_param_persistence_threshold": WIDTH}),
    "any number of micro-batches": (TwoLayers, varying),
    "parameters on the host": (TwoLayers, varying, {"offload_param": {"device": "cpu"}}),
    "made under zero.Init": (TwoLayers, varying, {"built_whole": False}),
    "a module that is called twice": (Repeated, scalar),
    "a module that is called twice, micro-batches": (Repeated, varying),
    "evaluated between micro-batches": (TwoLayers, evaluated_between),
    "three models, one optimizer": ([TwoLayers] * 3, several_models),
    "three models, an optimizer each": ([TwoLayers] * 3, several_models, {}, {"apart": True}),
    "three models, an optimizer each, micro-batches": ([TwoLayers] * 3, several_micro_batches, {}, {"apart": True}),
    "two forwards, two backwards": (TwoLayers, two_forwards),
    "one head of two": (TwoHeads, one_head),
    "a head for each micro-batch": (TwoHeads, a_head_for_each_micro_batch),
    "leaf modules": (Branches, scalar, {"leaf": nn.ModuleList}),
    "leaf modules, a tensor": (Branches, tensor, {"leaf": nn.ModuleList}),
    "leaf modules, micro-batches": (Branches, micro_batches, {"leaf": nn.ModuleList}),
    "a weight that is read outside of its module": (Tied, scalar),
    "a weight that is read outside of its module, micro-batches": (Tied, micro_batches),
    "modules with one weight": (TiedModules, scalar),
    "modules with one weight, micro-batches": (TiedModules, micro_batches),
    "a gradient of the input": (TwoLayers, gradient_of_the_input),
    "weights that are edited": (TwoLayers, edited),
    "a second model in the loss": ([TwoLayers, TwoLayers], scored),
    "clipped, deferred": (TwoLayers, clipped, {}, {"clip_norm": 0.5, "policy": "deferred"}),
    "clipped, leaf modules": (Branches, clipped, {"leaf": nn.ModuleList}, {"clip_norm": 0.5, "policy": "deferred"}),
    "a loss scale": (TwoLayers, through_opt, {}, {"loss_scale": 1024.0}),
    "a loss scale, a plain backward": (TwoLayers, scalar, {}, {"loss_scale": 1024.0}),
    "a GradScaler": (TwoLayers, scaled_by_torch),
    "micro-batches, immediate": (TwoLayers, micro_batches, {}, {"policy": "immediate"}),
}
for model, reentrant in (
    (model, way) for model in (TwoLayers, FrozenNorm, Blocks, Adapter, OfTwoOutputs) for way in (0, 1)
):
    name = f"{model.__name__}, {'reentrant' if reentrant else 'recomputed'}"
    make = functools.partial(model, reentrant=bool(reentrant))
    leaf = {"leaf": TwoOutputs} if model is OfTwoOutputs else {}
    CASES |= {
        f"{name}": (make, scalar_of_input, leaf),
        f"{name}, a tensor": (make, tensor, leaf),
        f"{name}, persistent": (make, tensor, {**leaf, "stage3_param_persistence_threshold": WIDTH}),
        f"{name}, deferred": (make, scalar_of_input, leaf, {"policy": "deferred"}),
        f"{name}, micro-batches": (make, functools.partial(micro_batches, counts=(2,), grad=True), leaf),
        f"{name}, through opt": (make, through_opt, leaf),
    }
    if not reentrant:
        CASES[f"{name}, micro-batches without a gradient of the input"] = (make, without_input_gradient, leaf)


def made(kinds, leaf=None, *, built_whole=True, rank=None, **options):
    for n, kind in enumerate(kinds if isinstance(kinds, list) else [kinds]):

        def make(seed=n, kind=kind):
            torch.manual_seed(seed)
            net = kind()
            if leaf is not None and rank is not None:
                deepspeed.utils.set_z3_leaf_modules(net, [leaf])
            return net

        threshold = {"stage3_param_persistence_threshold": 0, **options}
        yield make() if rank is None else zero3(rank, make, built_whole=built_whole, **threshold)


def scenario(case):
    kinds, loop, *others = CASES[case]
    options, settings = (*others, {}, {})[:2]
    return kinds, loop, options, settings


@functools.cache
def on_one_device(case):
    kinds, loop, _, settings = scenario(case)
    run = Run(list(made(kinds)), apart=settings.get("apart", False))
    start = run.weights()
    for step in range(STEPS):
        loop(run, step)
    return start, run.weights()


def on_a_rank(rank, case):
    kinds, loop, options, settings = scenario(case)
    start, want = on_one_device(case)
    assert not close(start, want, 1e-3)
    run = None
    try:
        run = Run(list(made(kinds, rank=rank, **options)), rank, **settings)
        for step in range(STEPS):
            loop(run, step)
    except LowmemError as error:
        if run is not None and not close(run.weights(), start, 0):
            return DIFFERENT, f"refused after an update: {error}"
        return REFUSED, str(error)
    finally:
        for opt in run.opts if run else ():
            opt.remove()
    if not (run.released and all(map(released, run.nets)) and all(map(persistent, run.nets))):
        return DIFFERENT, "something stays gathered that DeepSpeed would release, or the other way round"
    return (EQUAL if close(run.weights(), want, 1e-5) else DIFFERENT), ""


def close(found, want, tolerance):
    return all(torch.allclose(found[name], want[name], rtol=tolerance, atol=tolerance) for name in want)


def test_backwards(two):
    verdicts = {}
    for case in sample(CASES, 1 / 8):
        verdicts[case], (other, _) = two.run(on_a_rank, case)
        assert verdicts[case][0] == other, case
    report("DeepSpeed's backwards of users, on two ranks", verdicts, at_least=71 - len(CASES) + len(verdicts))


def through_the_engine(rank):
    """The engine's forward and backward require an optimizer of DeepSpeed."""
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    zero3(rank, TwoLayers)  # initializes DeepSpeed
    engine = deepspeed.initialize(model=TwoLayers(), config=config)[0]
    run = Run([engine.module], rank)
    before, (x, y) = run.weights(), run.rows(0)
    with pytest.raises(RuntimeError, match=r"Direct calls to tensor\.backward"):
        cross_entropy(engine(x), y).backward()
    with pytest.raises(AttributeError, match="DeepSpeedZeRoOffload"):
        engine.backward(cross_entropy(engine(x), y))
    assert close(run.weights(), before, 0)
    scalar(run, 0)
    assert run.opts[0].last_step.step == 1
    assert not close(run.weights(), before, 1e-3)
    run.opts[0].remove()


def test_the_engine_itself_raises_before_the_first_update(two):
    two.run(through_the_engine)
