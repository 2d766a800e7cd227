"""Tiled MLPs compute one tile of tokens at a time and give the outputs and gradients of untiled ones."""

import copy

import pytest
import torch
from support.mlps import GROUPS, MLP, MODELS, Net, assert_close, build, gradients, step
from support.products import FULL, pairwise

import lowmem
from lowmem.errors import ConfigError, StepError, UnsupportedError
from lowmem.layers.mlp import tile_mlps

# -- which modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "sizes", "place"), MODELS.values(), ids=MODELS)
def test_mlps_are_found(kind, sizes, place):
    with torch.device("meta"):
        assert tile_mlps(build(kind, sizes), 8) == [f"{place}.0.mlp", f"{place}.1.mlp"]


def on_meta(kind):
    with torch.device("meta"):
        return build(kind, GROUPS)


class Residual(MLP):
    def forward(self, x, residual): ...


A_MIXTURE = r"'model\.layers\.0\.mlp' is a mixture of experts.*Omit mlp_tile"


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        *(pytest.param(lambda kind=kind: on_meta(kind), {}, A_MIXTURE, id=kind) for kind in ("Mixtral", "GptOss")),
        (lambda: on_meta("OPT"), {}, "OPTForCausalLM"),
        (lambda: Net(Residual()), {}, "Net has no MLP"),  # its forward takes two tensors
        (lambda: Net(MLP()), {"tokens": 0}, "mlp_tile=0"),
    ],
)
def test_a_model_that_cannot_be_tiled_raises(make, options, words):
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        tile_mlps(make(), **{"tokens": 8, **options})


class Mixing(MLP):
    def forward(self, x):
        return x * self.down(self.act(self.up(x.mean(-2, keepdim=True))))


class Causal(MLP):
    def forward(self, x):
        return super().forward(x.cumsum(-2))


class Pooling(MLP):
    def forward(self, x):
        return super().forward(x)[..., :1]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("cls", [Mixing, Causal, Pooling])
def test_a_module_that_only_resembles_an_mlp_raises_in_its_first_forward(cls, tokens):
    net, fault = Net(cls()), "not return one tensor of the shape" if cls is Pooling else "mixes tokens"
    tile_mlps(net, tokens)
    with pytest.raises(UnsupportedError, match=f"{cls.__name__} .*{fault}.*Omit mlp_tile"):
        net(torch.randn(2, 8, 32))


# Without --full: a gated MLP, one that also normalizes its output, and one of Conv1D.
KINDS = MODELS if FULL else {name: MODELS[name] for name in ("Llama", "Gemma2", "GPT-2")}


@pytest.mark.parametrize(("kind", "checkpointing", "tokens"), pairwise(KINDS, [False, True], [1, 7, 16, 31]))
def test_loss_and_gradients_equal_whole_mlps(kind, checkpointing, tokens, token_batches):
    model = build(*MODELS[kind][:2], checkpointing)
    (batch,) = token_batches(1)  # 32 tokens
    loss, grads = step(model, batch)
    tile_mlps(model, tokens)
    tiled_loss, tiled = step(model, batch)
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=0)
    assert_close(tiled, grads)


def test_one_tile_is_bit_equal(token_batches):
    model = build("Llama", GROUPS)
    (batch,) = token_batches(1)
    loss, grads = step(model, batch)
    tile_mlps(model, 32)
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: calls.append(args))
    tiled_loss, tiled = step(model, batch)
    assert len(calls) == 1  # nothing is recomputed
    assert torch.equal(tiled_loss, loss)
    assert all(torch.equal(tiled[name], grad) for name, grad in grads.items())


class Shared(MLP):
    """With a tile of one token, the bias gradient is a view of the output's gradient, which has other uses too."""

    def forward(self, x):
        return self.down(self.act(self.gate(x))) + self.up.bias.view(1, -1)


class Part(MLP):
    """One weight is unused and gets no gradient."""

    def forward(self, x):
        return self.down(self.act(self.gate(x)))


@pytest.mark.parametrize(("cls", "tokens"), [(MLP, 3), (Shared, 1), (Part, 3)])
@pytest.mark.parametrize("shape", [(8, 32), (2, 8, 32), (2, 2, 4, 32)])
def test_inputs_of_any_shape_and_stride(shape, cls, tokens):
    net = Net(cls(wide=32))
    for x in (torch.randn(shape), torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])):
        results = []
        for _ in range(2):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            out = net(leaf) + net.mlp(x=leaf)  # by position and by name
            out.square().sum().backward()
            results.append(gradients(net) | {"in": leaf.grad, "out": out.detach()})
            tile_mlps(net, tokens)
        del net.mlp.forward, net.mlp._tiling
        assert_close(results[1], results[0])


@pytest.mark.cpu_only("the simulated GPU has no compiler")
def test_a_compiled_model():
    net, results = Net(MLP(wide=32)), []
    tile_mlps(net, 3)
    for forward in (net, torch.compile(net, backend="aot_eager")):
        net.zero_grad()
        forward(torch.ones(8, 32)).square().sum().backward()
        results.append(gradients(net))
    assert_close(*results)


def test_each_hook_fires_once_with_the_whole_gradient():
    net = Net(MLP())
    x = torch.randn(8, 32)
    net(x).square().sum().backward()
    whole = gradients(net)
    tile_mlps(net, 3)
    seen, fired = {}, []
    for name, param in net.named_parameters():
        param.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))
        param.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    net(x).square().sum().backward()
    assert sorted(fired) == sorted(whole)
    assert_close({name: torch.stack(grads).squeeze(0) for name, grads in seen.items()}, whole)


def test_changing_a_weight_after_forward_raises():
    """Autograd raises without tiles too."""
    net = Net(MLP())
    tile_mlps(net, 3)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=1e-2)
    first, second = (net(torch.randn(8, 32)).sum() for _ in range(2))
    opt.backward(first)
    with pytest.raises(StepError, match=r"tiled MLP \(MLP\) has changed since the forward"):
        opt.backward(second)


def test_a_second_derivative_raises():
    net = Net(MLP())
    tile_mlps(net, 3)
    x = torch.randn(8, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# -- dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_as_accurate_as_of_whole_mlps(dtype):
    """The gradients of 64 tiles and their sum are each rounded once. An untiled MLP rounds only once, so errors grow by
    at most √2 if there is no other error, as in the last bias. Sums in 16 bits would be several times worse.
    """
    exact = MLP()
    for param in exact.parameters():
        param.data = param.data.to(dtype).double()
    x, grad = (torch.randn(2, 512, 32).to(dtype) for _ in range(2))
    exact(x.double()).backward(grad.double())
    reference = gradients(exact)

    def errors(tokens=None, rows=None):
        net = Net(copy.deepcopy(exact).to(dtype))
        if tokens:
            tile_mlps(net, tokens)
        for part in torch.stack([x, grad]).view(2, -1, 32).split(rows or 1024, dim=1):
            net.mlp(part[0]).backward(part[1])
        grads = gradients(net.mlp)
        assert all(grad.dtype == dtype for grad in grads.values())
        return {name: (grads[name] - grad).norm() / grad.norm() for name, grad in reference.items()}

    whole, tiled, in_16_bits = errors(), errors(tokens=16), errors(rows=16)
    for name, error in tiled.items():
        assert error <= (1.6 if name == "down.bias" else 1.2) * whole[name], name
    assert in_16_bits["down.bias"] > 2 * tiled["down.bias"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast(checkpointing, token_batches):
    """The backward runs outside of autocast. Casts cached without gradients must not reach the next forward."""
    model = build("Llama", GROUPS, checkpointing)
    long, short = token_batches(2)
    short = {name: value[:, :4] for name, value in short.items()}
    results, dtypes = [], set()
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: dtypes.add(args[-1].dtype))
    for _ in range(2):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = model(**long).loss + model(**short).loss
        loss.backward()
        results.append(gradients(model))
        tile_mlps(model, 8)  # the short batch is one tile
    assert dtypes == {torch.bfloat16}
    assert_close(results[1], results[0], tolerance=1e-2)
    assert all(grad.dtype == torch.float32 for grad in results[1].values())


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_is_drawn_per_tile():
    """The backward recomputes with the forward's random numbers and does not change the generator's state."""
    mlp = MLP(drop=0.3)
    x = torch.randn(8, 32)
    torch.manual_seed(1)
    out = torch.cat([mlp(tile) for tile in x.split(3)])
    after = torch.rand(1)
    out.square().sum().backward()
    whole = gradients(mlp) | {"out": out}
    tile_mlps(Net(mlp), 3)
    torch.manual_seed(1)
    out = mlp(x)
    assert torch.equal(torch.rand(1), after)
    state = torch.get_rng_state()
    out.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(gradients(mlp) | {"out": out}, whole)
