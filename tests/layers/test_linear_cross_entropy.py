"""Tests the tiled head: its loss and gradients compared with float64, its memory, and invalid arguments."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers import head_tiles
from lowmem.layers.head import METRICS, Head, linear_cross_entropy, token_losses

TOKENS, SIZE, VOCABULARY = 37, 48, 1003
SMALL = 60_000  # bytes, which split the vocabulary into 19 blocks


@pytest.fixture
def inputs():
    """Returns hidden states, a weight whose logits are as large as in trained models, a bias, and labels."""
    hidden = torch.randn(TOKENS, SIZE, dtype=torch.float64) * 2
    weight, bias = torch.randn(VOCABULARY, SIZE, dtype=torch.float64) * 0.3, torch.randn(VOCABULARY).double()
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[3], labels[5], labels[7] = labels[4], -100, VOCABULARY - 1
    return hidden, weight, bias, labels


def logits_of(hidden, weight, bias, scale, softcap, temperature):
    z = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    z = z * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def reference(hidden, weight, bias, labels, logit_scale=1.0, softcap=None, temperature=1.0, label_smoothing=0.0):
    """Returns the mean loss from full logits, as the documentation of `Head` defines it."""
    z = logits_of(hidden, weight, bias, logit_scale, softcap, temperature)
    target = z.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    losses = z.logsumexp(-1) - (1 - label_smoothing) * target
    losses = losses - label_smoothing * z.mean(-1) if label_smoothing else losses
    return losses[labels != -100].mean()


def leaves(tensors, dtype):
    return [tensor.detach().clone().to(dtype).requires_grad_() for tensor in tensors]


def relative(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


OPTIONS = list(itertools.product((False, True), (1.0, 0.5), (None, 20.0), (1.0, 1.3), (0.0, 0.1)))


def assert_close_to_float64(tensors, labels, dtype, tolerance, **options):
    """Compares the loss and all gradients."""
    exact, mine = leaves([tensor.to(dtype) for tensor in tensors], torch.float64), leaves(tensors, dtype)
    (hidden, weight, bias), (own_hidden, own_weight, own_bias) = ([*leaves, None][:3] for leaves in (exact, mine))
    expected = reference(hidden, weight, bias, labels, **options)
    loss = linear_cross_entropy(own_hidden, own_weight, labels, bias=own_bias, memory=SMALL, **options)
    expected.backward()
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for one, other in zip(mine, exact, strict=True):
        assert one.grad.dtype == dtype
        assert relative(one.grad, other.grad) <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_loss_and_gradients_equal_whole_logits_in_float64(dtype, tolerance, inputs):
    """In bfloat16, the gradient of a hidden state is rounded twice, by at most 2⁻⁹ each time."""
    *tensors, labels = inputs
    for has_bias, *values in OPTIONS:
        options = dict(zip(("logit_scale", "softcap", "temperature", "label_smoothing"), values, strict=True))
        assert_close_to_float64(tensors[: 2 + has_bias], labels, dtype, tolerance, **options)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("rows", [slice(0, 300), slice(500, 501), slice(700, None)], ids=str)
def test_words_with_a_bias_of_minus_infinity_are_never_chosen(rows, softcap, inputs):
    """A tile with only such words must not produce NaN, even if it is the first one."""
    *tensors, labels = inputs
    tensors[2][rows] = -torch.inf
    allowed = torch.arange(VOCABULARY)[tensors[2] > -torch.inf]
    labels = torch.where(labels < 0, labels, allowed[labels.clamp(max=len(allowed) - 1)])
    assert_close_to_float64(tensors, labels, torch.float32, 2e-6, softcap=softcap)


def test_metrics_equal_whole_logits(inputs):
    hidden, weight, bias, labels = inputs
    labels = labels.clamp(min=0)
    z = logits_of(hidden, weight, bias, 0.5, 20.0, 1.3)
    labels[:9] = z[:9].argmax(-1)
    p = z.softmax(-1)
    expected = {
        "entropy": -(p * p.log()).sum(-1),
        "log_sum_sq_probs": p.square().sum(-1).log(),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == labels,
    }
    single = (tensor.float() for tensor in (hidden, weight, bias))
    losses, log_sums, values = token_losses(*single, labels, Head(0.5, 20.0, 1.3, memory=SMALL), METRICS)
    exact = -z.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sums.double(), z.logsumexp(-1), rtol=1e-5, atol=1e-5)
    for name in METRICS:
        torch.testing.assert_close(values[name].to(expected[name].dtype), expected[name], rtol=1e-4, atol=1e-4)
    assert values["is_top1"].dtype == torch.bool
    assert values["is_top1"][:9].all()


def test_reductions_and_shapes(inputs):
    hidden, weight, _, labels = inputs
    hidden, labels = hidden.float()[:36].view(2, 18, SIZE), labels[:36].view(2, 18)
    weight = weight.float()
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    counted = int((labels != -100).sum())
    assert losses.shape == labels.shape
    assert losses[labels == -100].eq(0).all()
    assert counted == 35
    total = losses.sum()
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, reduction="sum"), total)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels), total / counted)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, num_items=torch.tensor(70)), total / 70)
    nothing = torch.full_like(labels, -100)
    assert linear_cross_entropy(hidden, weight, nothing) == 0  # rather than NaN
    other = linear_cross_entropy(hidden, weight, labels.masked_fill(labels == -100, 7), ignore_index=7, reduction="sum")
    torch.testing.assert_close(other, total)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_trained_tensors_get_a_gradient(frozen, inputs):
    hidden, weight, _, labels = inputs
    mine = dict(zip(("hidden", "weight"), leaves((hidden, weight), torch.float32), strict=True))
    mine[frozen].requires_grad_(False)
    linear_cross_entropy(**mine, labels=labels).backward()
    assert {name for name, tensor in mine.items() if tensor.grad is not None} == mine.keys() - {frozen}
    with torch.no_grad():
        assert not linear_cross_entropy(**mine, labels=labels).requires_grad


def test_autocast_sets_the_dtype_of_products_only(inputs):
    """On a CPU, products are in float32 even under autocast, and in a backward inside autocast."""
    hidden, weight, _, labels = inputs
    plain, cast = leaves((hidden, weight), torch.float32), leaves((hidden, weight), torch.float32)
    linear_cross_entropy(*plain, labels).backward()
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(*cast, labels).backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(plain, cast, strict=True))


class Largest(TorchDispatchMode):
    """Records the names of operations and the size of their largest output that is not one of `known`."""

    def __init__(self, known=()):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.nbytes, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            if tensor.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.cpu_only("it is about casts of a CPU")
def test_on_a_cpu_a_block_is_cast_a_few_rows_at_a_time(monkeypatch):
    weight = torch.randn(300, 64).bfloat16().requires_grad_()
    hidden, labels = torch.randn(20, 64).bfloat16().requires_grad_(), torch.randint(300, (20,))
    (expected,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(hidden.float() @ weight.float().t(), labels), weight
    )
    monkeypatch.setattr(head_tiles, "SLICE", 70 * 64 * 4)
    loss, casts = linear_cross_entropy(hidden, weight, labels), []
    monkeypatch.setattr(
        head_tiles, "_product", lambda left, right: casts.append(right.shape[1]) or left.float() @ right.float()
    )
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(grad, expected, rtol=0.01, atol=1e-5)
    assert casts == [70, 70, 70, 70, 20]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "temperature": 1.3}, {"label_smoothing": 0.1}], ids=str)
def test_stored_probabilities_give_the_same_gradients(options, dtype, tolerance, inputs):
    """The backward must not compute any logits again."""
    hidden, weight, _, labels = inputs
    labels, scales = labels.clamp(min=0), torch.rand(TOKENS) + 0.5
    for memory, stored in ((1 << 20, True), (SMALL, False)):
        exact, mine = leaves([hidden.to(dtype), weight.to(dtype)], torch.float64), leaves((hidden, weight), dtype)
        losses, *_ = token_losses(*mine, None, labels, Head(memory=memory, **options), caches_probabilities=True)
        assert (losses.grad_fn.saved_tensors[-1] is not None) is stored
        (losses * scales).sum().backward()
        for token, scale in enumerate(scales):
            (
                scale * reference(exact[0][token : token + 1], exact[1], None, labels[token : token + 1], **options)
            ).backward()
        for one, other in zip(mine, exact, strict=True):
            assert relative(one.grad, other.grad) <= tolerance


@pytest.mark.parametrize("memory", [1 << 20, 4 << 20])
def test_tiles_stay_within_their_memory_limit(memory):
    """All tensors of a tile share the limit, so the largest one has a part of it."""
    hidden, weight = torch.randn(1500, 64, requires_grad=True), torch.randn(20_000, 64)
    with Largest((hidden, weight)) as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(1500, dtype=torch.int64), memory=memory).backward()
    assert memory / 6 <= largest.nbytes <= memory


LEARNED = torch.tensor(0.5, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 700}, "head_memory=700 bytes"),
        ({"softcap": 0.0}, "softcap=0.0 is not valid. Expected a number > 0, or None"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 is not valid. Expected a number >= 0 and <= 1"),
        ({"logit_scale": float("nan")}, "logit_scale=nan"),
        ({"reduction": "avg"}, "reduction='avg' is not valid. Expected 'mean'"),
        ({"reduction": "none", "num_items": 7}, "num_items has no effect"),
        *(  # they would get no gradient
            ({name: LEARNED}, rf"{name}=tensor\(0.5000, .*requires_grad=True\) .* Expected a number")
            for name in ("logit_scale", "softcap", "temperature", "label_smoothing")
        ),
    ],
)
def test_an_option_out_of_range_raises(options, words, inputs):
    hidden, weight, _, labels = inputs
    with pytest.raises(ConfigError, match=words):
        linear_cross_entropy(hidden.float(), weight.float(), labels, **options)


@pytest.mark.cpu_only("a GPU stops with an assertion, and takes no more commands")
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("label", [-1, -VOCABULARY, VOCABULARY, -101])
def test_a_label_outside_the_vocabulary_raises(label, learns, inputs):
    """PyTorch raises too. This includes the path where the host must not wait for the labels."""
    hidden, weight, _, labels = inputs
    labels[2] = label
    with pytest.raises(IndexError, match="is out of bounds"):
        torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)
    with pytest.raises(IndexError, match=r"a label is neither in \[0, 1003\) nor ignore_index"):
        linear_cross_entropy(hidden.float().requires_grad_(learns), weight.float(), labels)


def test_changing_a_weight_before_backward_raises(inputs):
    """Autograd raises for any saved tensor that was modified."""
    hidden, weight, _, labels = inputs
    weight = weight.float().requires_grad_()
    loss = linear_cross_entropy(hidden.float(), weight, labels)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_is_read_back(inputs):
    """Reading a value on the host would wait for all work on the GPU."""
    hidden, weight, _, labels = inputs
    mine = leaves((hidden, weight), torch.float32)
    with Largest() as operations:
        linear_cross_entropy(*mine, labels, memory=SMALL, label_smoothing=0.1, softcap=9.0).backward()
    assert not operations.names & {"_local_scalar_dense", "nonzero", "masked_select"}


def test_second_derivatives_raise(inputs):
    """A gradient penalty through a frozen head needs them."""
    hidden, weight, _, labels = inputs
    hidden = hidden.float().requires_grad_()
    loss = linear_cross_entropy(hidden, weight.float(), labels)
    with pytest.raises(UnsupportedError, match=r"create_graph=True: .*cross_entropy\(hidden @ weight.T, labels\)"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_the_gradient_of_a_log_sum_does_not_take_stored_probabilities(inputs):
    hidden, weight, _, labels = inputs
    grads = []
    for caches in (False, True):
        mine = leaves((hidden, weight), torch.float32)
        losses, log_sums, _ = token_losses(*mine, None, labels.clamp(min=0), Head(), caches_probabilities=caches)
        (losses.sum() + log_sums.square().sum()).backward()
        grads.append([tensor.grad for tensor in mine])
    torch.testing.assert_close(*grads)
