"""Training on gradients that are computed as they are read: the weights of those that exist, without their memory."""

import copy
import gc
import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from support.attack import Settings, compare
from support.nets import Memory, plain_step, through_file
from test_linear_cross_entropy import Largest
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.layers.embedding import ComputedEmbedding, EmbeddingGradient, _computed, compute_gradient
from lowmem.layers.head import linear_cross_entropy
from lowmem.step import hooks
from lowmem.tiles import stored

VOCABULARY, MEMORY = 1201, 100_000  # bytes: about 12 blocks
MIB = 1 << 20


@pytest.fixture
def model(tiny_llama):
    def make(dtype=torch.float32, vocab_size=VOCABULARY, memory=MEMORY, **config):
        model = tiny_llama(dtype, vocab_size=vocab_size, **config)
        assert compute_gradient(model.get_input_embeddings(), memory)
        return model

    return make


@pytest.fixture
def batches(token_batches):
    def make(count, size=(2, 20), vocab_size=VOCABULARY):
        return [batch["input_ids"] for batch in token_batches(count, size, vocab_size)]

    return make


def loss_of(model, ids, memory=MEMORY):
    hidden = model.model(ids).last_hidden_state[:, :-1]
    return linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:], memory=memory)


def refuse_offers(monkeypatch):
    """Every gradient is a tensor, as for a third-party optimizer."""
    monkeypatch.setattr(hooks.Hooks, "_offer", lambda *_: False)


def train(model, batches, micro_batches=1, **options):
    opt = lowmem.FusedOptimizer(model.named_parameters(), compile=False, **{"lr": 1e-2, **options})
    norms = []
    for n, ids in enumerate(batches, start=1):
        with opt.accumulate() if n % micro_batches else nullcontext():
            opt.backward(loss_of(model, ids) / micro_batches)
        if n % micro_batches == 0:
            norms.append(float(opt.last_step.grad_norm))
    return norms


RULES = ["adalomo", "adamw", "adafactor", "adafactor_t2t", "lans", "lion", "lomo", "scaled_adam"]
CHOICES = {
    "immediate": {},
    "two_pass": {"policy": "two_pass", "clip_norm": 0.5},
    "deferred": {"clip_norm": 0.5, "policy": "deferred"},
    "accumulated": {"micro_batches": 3, "clip_norm": 0.5},
    "clamped": {"clip_value": 1e-3, "loss_scale": 128.0},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("rule", RULES)
def test_weights_equal_training_on_stored_gradients(rule, choice, model, batches, monkeypatch, offers):
    """Two steps in float32. Sums over the gradient are added in another order: 2e-5 of a norm, which PyTorch sums over
    a whole tensor with that error, and nothing else changes.
    """
    options, tied = CHOICES[choice], RULES.index(rule) % 2 == list(CHOICES).index(choice) % 2
    nets = [model(tie_word_embeddings=tied) for _ in range(2)]
    samples = batches(2 * options.get("micro_batches", 1))
    norms = train(nets[0], samples, rule=rule, **options)
    assert offers["model.embed_tokens.weight"] >= {("EmbeddingGradient", True)}
    assert offers["model.embed_tokens.weight" if tied else "lm_head.weight"] >= {("HeadGradient", True)}
    refuse_offers(monkeypatch)
    assert train(nets[1], samples, rule=rule, **options) == pytest.approx(norms, rel=5e-5)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_another_optimizers_rule_gets_tensors_and_the_same_bits(tied, model, batches, offers):
    nets = [model(tie_word_embeddings=tied) for _ in range(2)]
    samples = batches(3)
    train(nets[0], samples, rule=torch.optim.AdamW, foreach=False)
    adamw = torch.optim.AdamW(nets[1].parameters(), lr=1e-2, foreach=False)
    for ids in samples:
        plain_step(adamw, loss_of(nets[1], ids))
    assert all(map(torch.equal, *(net.parameters() for net in nets)))
    assert {takes for kinds in offers.values() for _, takes in kinds} == {False}


def test_autograd_grad_returns_a_tensor(model, batches):
    (ids,) = batches(1)
    net = model()
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2)
    weights = [net.lm_head.weight, net.model.embed_tokens.weight]
    grads = torch.autograd.grad(loss_of(net, ids), weights)
    opt.remove()
    loss_of(net, ids).backward()
    assert all(map(torch.equal, grads, (weight.grad for weight in weights)))


def test_a_paused_backward_leaves_no_gradient():
    compare(Settings(computed=True, events=((1, "paused"),)))


def test_changing_a_weight_before_backward_raises(model, batches):
    """As for any tensor that autograd has saved."""
    (ids,) = batches(1)
    net = model()
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2)
    loss = loss_of(net, ids)
    with torch.no_grad():
        net.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        opt.backward(loss)


def test_a_nested_backward_that_moves_an_embedding_is_named(model, batches):
    """It is used in a region with reentrant checkpointing and outside: its gradient comes in two parts."""
    net, (ids,) = model(), batches(1)
    embed = net.model.embed_tokens
    opt = lowmem.FusedOptimizer(embed.named_parameters(), rule="lomo", lr=1e-2, compile=False)
    outside = embed(ids)
    inside = checkpoint(lambda x: (x + embed(ids.flip(-1))).tanh(), outside, use_reentrant=True)
    with pytest.raises(lowmem.errors.StepError, match="in two parts"):
        opt.backward((inside * 2).sum())


class Operations(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"policy": "two_pass", "clip_norm": 0.5}, {"policy": "deferred"}], ids=str)
def test_nothing_is_read_back(options, model, batches):
    """By a copy of a value to the host a GPU would have to finish everything before."""
    net = model(tie_word_embeddings=True)
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2, compile=False, **options)
    losses = [loss_of(net, ids) for ids in batches(1)]
    opt.backward(losses[0])
    indices, hidden = torch.randint(VOCABULARY, (30,)), torch.randn(30, 32, requires_grad=True)
    with Operations() as operations:
        hidden = hidden + net.model.embed_tokens(indices)
        loss = linear_cross_entropy(
            hidden, net.lm_head.weight, indices, memory=MEMORY, label_smoothing=0.1, softcap=9.0
        )
        opt.backward(loss)
    assert not operations.calls.keys() & {"_local_scalar_dense", "nonzero", "masked_select"}


# --- memory -------------------------------------------------------------------------------------------------------


class MemoryWithoutHooks(Memory):
    """Without hooks on parameters, which would have to see every gradient as a tensor."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


@pytest.mark.parametrize(
    ("tied", "choice"), [(False, "immediate"), (True, "immediate"), (True, "two_pass"), (False, "deferred")]
)
def test_no_tensor_of_vocabulary_size_except_the_weights(tied, choice, model, batches, monkeypatch):
    """128k words: weights of 32 MiB each. No tensor has a quarter of that, nor do all together half of it above the
    weights, once the optimizer has its states, which are vectors.
    """
    monkeypatch.setattr(stored, "CPU_TILE", 1 << 19)  # fewer operations to track
    vocabulary, memory = 131_072, 4 * MIB
    net = model(vocab_size=vocabulary, memory=memory, hidden_size=64, num_hidden_layers=1, tie_word_embeddings=tied)
    assert net.lm_head.weight.nbytes == 32 * MIB
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-3, compile=False, **CHOICES[choice])
    first, second = batches(2, (1, 16), vocabulary)
    opt.backward(loss_of(net, first, memory))
    gc.collect()
    with Largest(net.parameters()) as largest, MemoryWithoutHooks(net, opt) as memory_of_step:
        opt.backward(loss_of(net, second, memory))
    assert largest.nbytes < 8 * MIB
    assert memory_of_step.above < 16 * MIB


def test_gradients_of_long_sequences_are_tensors(model, batches, offers):
    """Storing the inputs of the computation would save less than three quarters of the gradient."""
    train(model(), batches(1, (1, 250)))
    assert offers["lm_head.weight"] == {("HeadGradient", True)}
    offers.clear()
    train(model(), batches(1, (1, 400)))
    assert offers["lm_head.weight"] == {("HeadGradient", False)}


# --- against PyTorch ----------------------------------------------------------------------------------------------


class Plain(torch.nn.Module):
    """An embedding, a layer, and heads on one weight or two, tied or not; computed by lowmem or by PyTorch."""

    def __init__(self, computed, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.computed = computed
        self.embed, self.extra = (torch.nn.Embedding(VOCABULARY, 32) for _ in range(2))
        self.layer, self.last = (torch.nn.Linear(32, 32) for _ in range(2))
        self.weight = self.embed.weight if tied else torch.nn.Parameter(torch.randn(VOCABULARY, 32) * 0.3)
        self.biases = torch.nn.ParameterList([torch.randn(VOCABULARY), torch.randn(VOCABULARY)])
        self.prompt = torch.nn.Parameter(torch.randn(60, 32))
        if computed:
            assert compute_gradient(self.embed, MEMORY)
            assert compute_gradient(self.extra, MEMORY)

    def hidden(self, ids):
        return torch.tanh(self.layer(self.embed(ids)))

    def head(self, hidden, ids, bias=None):
        if self.computed:
            return linear_cross_entropy(hidden, self.weight, ids, bias=bias, memory=MEMORY)
        return F.cross_entropy(F.linear(hidden, self.weight, bias).flatten(0, -2), ids.flatten().long())


def loss_of_one_head(net, ids):
    return net.head(net.hidden(ids), ids)


def loss_of_two_heads(net, ids):
    """The bias of each is complete before the weight is."""
    hidden = net.hidden(ids)
    return net.head(hidden, ids, net.biases[0]) + net.head(-hidden, ids, net.biases[1])


def loss_of_a_prompt(net, ids):
    """Hidden states that are a part of a parameter."""
    return loss_of_one_head(net, ids) + net.head(net.prompt[5:45].view(2, 20, 32), ids)


def loss_with_a_penalty(net, ids):
    return loss_of_one_head(net, ids) + net.weight.square().mean()


def loss_with_backwards_inside(net, ids):
    """The head of a tied weight waits for its embedding, while reentrant checkpointing runs another backward."""
    inner = checkpoint(lambda hidden: net.last(hidden + net.extra(ids)), net.hidden(ids), use_reentrant=True)
    return net.head(inner, ids)


LOSSES = [loss_of_one_head, loss_of_two_heads, loss_of_a_prompt, loss_with_a_penalty, loss_with_backwards_inside]


def assert_equals_plain(loss, ids, options=None, policy="immediate", plain=False, tied=True):
    """Two steps of LOMO, and of PyTorch's SGD."""
    nets = [Plain(computed, tied) for computed in (True, False)]
    if options is not None:
        for net in nets:
            options(net)
    settings = {"rule": "lomo", "lr": 0.5, "policy": policy, "compile": False, "batching": False}
    opt = lowmem.FusedOptimizer(nets[0].named_parameters(), **settings)
    sgd = torch.optim.SGD(nets[1].parameters(), lr=0.5)
    for batch in ids[:2]:
        value = loss(nets[0], batch)
        value.backward() if plain else opt.backward(value)
        plain_step(sgd, loss(nets[1], batch))
    torch.testing.assert_close(*(net.state_dict() for net in nets), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("policy", "plain"), [
    ("immediate", False), ("immediate", True), ("two_pass", False), ("deferred", False), ("deferred", True),
], ids=lambda value: {False: "opt.backward", True: "loss.backward"}.get(value, value))  # fmt: skip
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_gradient_belongs_to_the_weights_before_the_step(loss, policy, plain, batches, offers):
    """Whatever is updated between a layer's backward and the one in which its weight's gradient is complete."""
    if loss is loss_with_backwards_inside and (plain or policy == "two_pass"):
        pytest.skip("refused: reentrant checkpointing under loss.backward() or in a measuring pass")
    assert_equals_plain(loss, batches(2), policy=policy, plain=plain)
    assert offers["weight"] == {("HeadGradient", True), ("EmbeddingGradient", True)}


def test_an_embedding_may_change_before_its_backward(batches, offers):
    """Its gradient does not depend on it."""

    def loss(net, ids):
        value = net.extra(ids).square().mean(-1).sigmoid().sum()
        scaled_extra(net)
        return value

    def scaled_extra(net):
        with torch.no_grad():
            net.extra.weight.mul_(1.1)

    assert_equals_plain(loss, batches(2))
    assert offers == {"extra.weight": {("EmbeddingGradient", True)}}


def test_a_backward_of_gradients_that_the_loop_reuses(batches):
    """`tensor.backward(gradient)`, with one tensor for all of them."""
    nets = [Plain(computed) for computed in (True, False)]
    opt = lowmem.FusedOptimizer(nets[0].named_parameters(), rule="lomo", lr=0.5, policy="deferred", compile=False)
    sgd = torch.optim.SGD(nets[1].parameters(), lr=0.5)
    for net in nets:
        grad = torch.zeros(2, 20, 32)
        for n, ids in enumerate(batches(2)):
            with opt.accumulate() if n == 0 else nullcontext():
                net.extra(ids).backward(grad.fill_(n + 1.0))
    sgd.step()
    torch.testing.assert_close(nets[0].extra.weight, nets[1].extra.weight)


@pytest.mark.parametrize("held", [False, True], ids=["freed", "held by autograd"])
@pytest.mark.parametrize(("policy", "plain"), [("immediate", False), ("immediate", True), ("deferred", False)])
def test_a_failed_backward_adds_nothing_to_the_next_step(policy, plain, held, batches, offers):
    """The head's part of a tied weight waits for the embedding's. It is freed at once, except on a GPU, where a thread
    of autograd holds a failed backward for a moment. Here a list does.
    """
    ids, more = batches(2)
    weights, kept = [], []
    for fails in (False, True):
        net = Plain(computed=True)
        opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.5, compile=False, policy=policy)

        def fail(_, opt=opt):
            if held:
                kept.append(opt._hooks.offers._running())
            raise ZeroDivisionError

        if fails:
            offers.clear()
            hidden = net.hidden(ids)
            loss = net.head(hidden, ids)
            hidden.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                loss.backward() if plain else opt.backward(loss)
            assert offers == {"weight": {("HeadGradient", True)}}
            if held:
                assert kept[-1]
            elif hidden.device.type == "cpu":
                assert opt._hooks.offers._running() is None
        loss = loss_of_one_head(net, more)
        loss.backward() if plain else opt.backward(loss)
        weights.append([param.detach().clone() for param in net.parameters()])
        opt.remove()
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("rule", ["lomo", "adalomo"])
def test_indices_are_sorted_once(rule, monkeypatch):
    """However many blocks the weight has, and passes the rule."""
    embedding = torch.nn.Embedding(VOCABULARY, 64)
    compute_gradient(embedding, 1 << 18)
    opt = lowmem.FusedOptimizer(embedding.named_parameters(), rule=rule, compile=False)
    output = embedding(torch.arange(16)).square().sum()
    with Operations() as operations:
        opt.backward(output)
    assert operations.calls["sort"] == 1


def mask(grad):
    """Trains the last rows, as for new words."""
    return grad * (torch.arange(len(grad), device=grad.device) >= VOCABULARY - 100)[:, None]


def mask_grad(param):
    param.grad = mask(param.grad)


HOOKS = {
    "hook": lambda weight: weight.register_hook(mask),
    "post-accumulate hook": lambda weight: weight.register_post_accumulate_grad_hook(mask_grad),
    "removed hook": lambda weight: weight.register_hook(mask).remove(),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("tied", [False, True])
def test_hooks_of_the_weight_see_its_gradient(hook, tied, batches, offers):
    """As a tensor, while they are there."""
    ids = [batch.clamp(min=VOCABULARY - 150) for batch in batches(2)]
    assert_equals_plain(loss_of_one_head, ids, options=lambda net: HOOKS[hook](net.weight), tied=tied)
    assert ("HeadGradient", hook == "removed hook") in offers["weight"]


@pytest.mark.parametrize("padding", [None, 7])
def test_indices_and_labels_may_be_int32(padding, batches):
    def pad(net):
        net.embed.padding_idx = padding

    ids = [batch.int() for batch in batches(2)]
    ids[0][0, :3] = 7
    assert_equals_plain(loss_of_one_head, ids, options=pad, tied=False)


# --- the embedding ------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Embedding):
    """As Gemma's."""

    def forward(self, ids):
        return super().forward(ids) * 3


def test_an_embedding_keeps_its_own_forward():
    torch.manual_seed(0)
    plain, computed = (Scaled(50, 400, padding_idx=7) for _ in range(2))
    computed.load_state_dict(plain.state_dict())
    assert compute_gradient(computed)
    assert compute_gradient(computed, memory=10_000)  # again: another size
    assert (type(computed).__name__, computed.memory) == ("Scaled", 10_000)
    assert isinstance(computed, Scaled)
    assert isinstance(computed, ComputedEmbedding)
    assert repr(computed) == repr(plain)
    ids = torch.tensor([[1, 7, 1], [49, 0, 7]])
    grads = []
    for embedding in (plain, computed):
        out = embedding(ids)
        out.backward(torch.arange(out.numel()).view(out.shape) / 100)
        grads.append(embedding.weight.grad)
        embedding.weight.grad = None
    assert torch.equal(*grads)
    opt = lowmem.FusedOptimizer(computed.named_parameters(), rule="lomo", lr=1.0)
    opt.backward((computed(ids) * torch.arange(400)).sum())
    before = plain.weight.detach()
    expected = torch.arange(400) * 3.0
    assert torch.equal(computed.weight[7], before[7])
    torch.testing.assert_close(computed.weight[49], before[49] - expected)
    torch.testing.assert_close(computed.weight[1], before[1] - 2 * expected)


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_rows_of_an_embedding_gradient_have_the_bits_of_the_full_one(tokens):
    """Also where they are added to what another use has left there, and where tokens are repeated or ignored."""
    torch.manual_seed(0)
    rows, size = 40, 8
    indices, grad = torch.randint(-1, rows, (tokens,)), torch.randn(tokens, size).bfloat16()
    others = torch.randn(rows, size)
    dense = torch.ops.aten.embedding_dense_backward(grad.float(), indices, rows, -1, False)
    part = EmbeddingGradient(indices, grad, memory=1 << 20)
    for start, stop in ((0, rows), (3, 20), (rows - 1, rows)):
        block = others[start:stop].clone()
        part.add_to(block, start)
        assert torch.equal(block, (others + dense)[start:stop])


def test_the_gradient_of_an_embedding_allocates_nothing_per_row():
    """But only per token: a vocabulary has many rows."""
    part = EmbeddingGradient(torch.arange(8), torch.ones(8, 64), memory=1 << 30)
    rows = torch.zeros(10_000, 64)
    with Largest((rows,)) as largest:
        part.add_to(rows, 0)
    assert largest.nbytes <= 8 * 64 * 4


def through_torch(module):
    return through_file(module, weights_only=False)


def through_another_process(module):
    """Which has not made the class of the embedding yet."""
    pickled = pickle.dumps(module)
    _computed.cache_clear()
    return pickle.loads(pickled)


@pytest.mark.parametrize("duplicate", [through_another_process, copy.deepcopy, through_torch])
@pytest.mark.parametrize("cls", [torch.nn.Embedding, Scaled])
def test_a_model_can_still_be_copied_and_pickled(cls, duplicate):
    module = torch.nn.Sequential(cls(10, 4, padding_idx=3))
    assert compute_gradient(module[0], memory=12_345)
    (other,) = duplicate(module)
    assert isinstance(other, cls) and isinstance(other, ComputedEmbedding)
    assert type(other).__name__ == type(module[0]).__name__
    assert (other.memory, other.padding_idx) == (12_345, 3)
    ids = torch.arange(10)
    assert torch.equal(other(ids), module(ids))
    assert torch.equal(*(torch.autograd.grad(net(ids).sum(), net.parameters())[0] for net in (other, module[0])))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_with_other_gradients_are_not_replaced(options):
    embedding = torch.nn.Embedding(10, 4, **options)
    assert not compute_gradient(embedding)
    assert type(embedding) is torch.nn.Embedding
    assert not compute_gradient(torch.nn.Linear(4, 4))
