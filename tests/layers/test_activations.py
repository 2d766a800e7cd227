"""Activation offload: the same weights to the last bit, in memory that does not grow with depth."""

import copy
import gc
import resource
import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from support.devices import seeded
from support.products import FULL
from support.shards import SHARDS
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import lowmem
from lowmem import placements
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers.activations import FileOffload, offload_to_file
from lowmem.run.memory import ACTIVATIONS, step_memory

MIB = 1 << 20
SIZE = (4, 128)  # tokens of a batch, for hidden states of 64 KiB, the least that is written
pytestmark = pytest.mark.filterwarnings("ignore:Expected a tensor")


def llama(layers=2, offload=None, **config):
    """A small Llama with checkpointed layers, whose inputs are on "disk", on the "host" as transformers puts them
    there, or where they are.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "use_cache": False, **config})).train()
    model.gradient_checkpointing_enable(offload=offload == "host")
    if offload == "disk":
        model.file = offload_to_file(model)
    return model


def loss_of(model, seed=0, size=SIZE):
    ids = torch.randint(97, size, generator=seeded(seed))
    return model(input_ids=ids, labels=ids).loss


NO_CONTEXT = nullcontext()


@mock.patch.object(torch.cpu, "is_available", lambda: False)  # save_on_cpu would pin memory, which needs a GPU
def train(model, context=NO_CONTEXT, micro_batches=1, steps=2, **options):
    """Trains on batches of different lengths."""
    opt = lowmem.FusedOptimizer(model.named_parameters(), model=model, lr=1e-2, **options)
    torch.manual_seed(1)
    for step in range(steps):
        for n in range(1, micro_batches + 1):

            def loss(n=n, step=step):
                return loss_of(model, seed=step * micro_batches + n, size=(4, 160 - 8 * step)) / micro_batches

            with context, opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(loss if opt.replay == "forward" else loss())
    return opt


def assert_equal(model, expected):
    for (name, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other), name


POLICIES = {
    "immediate": {"policy": "immediate"},
    "two_pass": {"policy": "two_pass", "clip_norm": 0.5},
    "two_pass, forward": {"policy": "two_pass", "clip_norm": 0.5, "replay": "forward"},
    "deferred": {"policy": "deferred", "clip_norm": 0.5, "micro_batches": 2},
}


CASES = [("disk", policy) for policy in POLICIES]
CASES += [("host", policy) for policy in (POLICIES if FULL else ["two_pass"])]


@pytest.mark.cpu_only("transformers pins memory without naming the CPU")
@pytest.mark.parametrize(("offload", "policy"), CASES)
def test_training_is_that_without_offload_to_the_last_bit(offload, policy):
    """Tied and frozen weights, and dropout, whose mask the recomputation draws again."""
    nets = [llama(offload=where, tie_word_embeddings=True, attention_dropout=0.1) for where in (None, offload)]
    for net in nets:
        net.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
        train(net, **POLICIES[policy])
    assert_equal(*nets)
    assert offload != "disk" or nets[1].file.nbytes >= 64 << 10


# --- Ranks --------------------------------------------------------------------------------------------------------


def shard(rank, kind, make):
    if kind == "replicated":
        return make()
    if kind == "zero3":
        return SHARDS["zero3"](rank, make)
    model = make()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@contextmanager
def trl_offload(model):
    """TRL's offload of all activations, which takes the CPU for an accelerator."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    cpu = mock.patch.object(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    others = {name: module for name, module in sys.modules.items() if name != "bitsandbytes"}  # else it empties a cache
    with cpu, mock.patch.dict(sys.modules, others, clear=True):
        yield get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False, min_offload_size=1)


def on_ranks(rank, kind, offload, options):
    """The weights without and with offload, and the bytes of the file."""
    weights = []
    for where in (None, offload):
        model = shard(rank, kind, lambda: llama(tie_word_embeddings=kind != "zero3"))
        if where == "host":
            model.gradient_checkpointing_enable(offload=True)
        file = offload_to_file(model) if where == "disk" else None
        torch.manual_seed(rank)
        with trl_offload(model) if where == "trl" else nullcontext(NO_CONTEXT) as context:
            train(model, context, **options, **({"placement": "replicated"} if kind == "replicated" else {}))
        weights.append([placements.full_tensor(param).clone() for param in model.parameters()])
    return weights, file and file.nbytes


KINDS_OF_RANKS = ("replicated", "fsdp2", "zero3")
RANKS = [(kind, "disk", "deferred") for kind in KINDS_OF_RANKS]
if FULL:
    RANKS += [(kind, "disk", policy) for kind in KINDS_OF_RANKS for policy in ("immediate", "two_pass")]
    RANKS += [(kind, "host", policy) for kind in KINDS_OF_RANKS for policy in ("immediate", "two_pass", "deferred")]
    RANKS += [(kind, "trl", policy) for kind in KINDS_OF_RANKS for policy in ("immediate", "deferred")]


@pytest.mark.parametrize(("kind", "offload", "policy"), RANKS)
def test_ranks_train_as_without_offload(two, kind, offload, policy):
    options = POLICIES["two_pass, forward" if kind == "zero3" and policy == "two_pass" else policy]
    for (expected, actual), nbytes in two.run(on_ranks, kind, offload, options):
        assert all(map(torch.equal, actual, expected))
        assert offload != "disk" or nbytes >= 64 << 10


# --- Memory -------------------------------------------------------------------------------------------------------


def live_after_forward(layers, offload):
    """Bytes of tensors at the end of a forward, apart from weights."""
    model = llama(layers, offload)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = loss_of(model)
        current = tracker.get_tracker_snapshot("current")[loss.device]
        del loss
    return current["Total"] - current["Parameter"]


def test_what_is_live_after_a_forward_does_not_grow_with_depth():
    """Without offload it grows by a hidden state per layer; with it by the state of the random number generator."""
    hidden = SIZE[0] * SIZE[1] * 32 * 4
    without, offloaded = ([live_after_forward(layers, where) for layers in (2, 8)] for where in (None, "disk"))
    assert without[1] - without[0] >= 6 * hidden
    assert offloaded[1] - offloaded[0] <= 0.6 * hidden


class Stack(torch.nn.Module):
    """Checkpointed layers in a loop of one's own."""

    def __init__(self, layers, offload):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))
        self.offload = offload

    def forward(self, x):
        for layer in self.layers:
            with self.offload or nullcontext():
                x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("file", [None, FileOffload()], ids=["memory", "file"])
def test_a_plan_counts_what_is_offloaded_nowhere(file, device):
    steps = []
    for layers in (2, 6):
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
            model, x = Stack(layers, file), torch.empty(512, 64)
            step = step_memory(
                model,
                lambda model=model: lowmem.FusedOptimizer(model.named_parameters(), rule="lomo", lr=1e-3),
                [lambda model=model, x=x: model(x)],
                [x],
            )
        assert step.host_peak < 64 << 10
        steps.append(step.live[ACTIVATIONS][step.backwards[0][0]])
    grown = (steps[1] - steps[0]) / (4 * 512 * 64 * 4)
    assert grown < 0.1 if file else grown >= 1
    assert file is None or file.nbytes == 0


# --- How long a tensor is in the file -----------------------------------------------------------------------------


def blocks(file):
    return -(-file.nbytes // MIB)


def gradients(model):
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return found


def test_graphs_that_live_at_once_do_not_share_memory():
    """As in DPO, and with an evaluation between forward and backward. They can be used in any order, and twice."""
    model, plain = llama(offload="disk"), llama()
    losses = [loss_of(model, seed) for seed in range(3)]
    with torch.no_grad():
        loss_of(model.eval(), 7)
    model.train()
    for seed in (1, 0, 0, 2):
        losses[seed].backward(retain_graph=True)
        loss_of(plain, seed).backward()
        assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_the_file_stays_as_large_as_its_largest_step():
    """A block of the file per layer and graph. What is free is free at once, without the garbage collector."""
    model = llama(offload="disk")
    gc.disable()
    try:
        train(model, steps=3)
        for _ in range(3):  # graphs without a backward
            loss_of(model)
        assert blocks(model.file) == 2
        several = [loss_of(model) for _ in range(3)]
        assert blocks(model.file) == 6
        del several[1]
        train(model, steps=3)
    finally:
        gc.enable()
    assert blocks(model.file) == 6


def test_a_backward_that_fails_frees_its_part_of_the_file():
    model, plain = llama(offload="disk"), llama()

    def fail(grad):
        raise RuntimeError("in backward")

    hook = model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="in backward"):
            loss_of(model).backward()
        model.zero_grad()
        gc.collect()  # the exception held the graph
    hook.remove()
    train(model)
    train(plain)
    assert_equal(model, plain)
    assert blocks(model.file) <= 3  # the last exception still holds a layer's


# --- What is written ----------------------------------------------------------------------------------------------

WIDE = torch.arange(1 << 18, dtype=torch.float32)
KINDS = {  # a tensor, and whether it is written
    "contiguous": (WIDE.view(512, 512), True),
    "transposed": (WIDE.view(512, 512).T, True),
    "a slice": (WIDE.view(512, 512)[3:-3, 1:-1], True),
    "every second row": (WIDE.view(512, 512)[::2], True),
    "expanded": (WIDE[:512].expand(300, 512), True),
    "bfloat16": (WIDE.view(512, 512).bfloat16(), True),
    "a mask": (WIDE.view(512, 512) % 3 == 0, True),
    "of several blocks": (torch.arange(800_000), True),
    "small": (WIDE[:1000], False),
    "of no dimension": (torch.tensor(3.0), False),
    "empty": (torch.empty(0, 5), False),
    "a parameter": (torch.nn.Parameter(WIDE), False),
}


@pytest.mark.parametrize(("tensor", "written"), KINDS.values(), ids=KINDS)
def test_a_layer_is_recomputed_from_the_same_tensor(tensor, written):
    offload, seen = FileOffload(), []

    def layer(x, value):
        seen.append((value.detach().clone(), value.dtype, value.stride(), value.requires_grad))
        return x.exp() * value.float().sum()

    with offload:
        loss = checkpoint(layer, torch.ones((), requires_grad=True), tensor, use_reentrant=False)
    loss.backward()
    (first, *facts), (second, *again) = seen
    assert torch.equal(first, second)
    assert facts == again
    assert (offload.nbytes > 0) == written


def test_an_input_that_layers_share_is_written_once():
    """Models hand one mask to every layer. A tensor that was changed in place is another one."""
    offload, x = FileOffload(), torch.ones((), requires_grad=True)
    mask, losses = torch.ones(2 * MIB, dtype=torch.bool), []
    for layer in range(6):
        if layer == 4:
            mask.logical_not_()
        with offload:
            losses.append(checkpoint(lambda x, mask: x.exp() * mask.sum(), x, mask, use_reentrant=False))
    assert offload.nbytes == 4 * MIB
    for loss in losses:
        loss.backward()
    expected = torch.ones((), dtype=torch.float64).exp() * 4 * 2 * MIB
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-6, atol=0)


def test_a_copy_of_the_model_offloads_too():
    """As trainers copy a model for a reference."""
    model = llama(offload="disk")
    del model.file
    other = copy.deepcopy(model)
    train(model)
    train(other)
    assert_equal(other, model)


# --- What is refused ----------------------------------------------------------------------------------------------


def test_a_model_without_checkpointing_is_refused():
    model = llama()
    model.gradient_checkpointing_disable()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has none; set gradient_checkpointing=true"):
        offload_to_file(model)


def test_reentrant_checkpointing_is_refused():
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedError, match=r"kwargs={'use_reentrant': False}"):
        offload_to_file(model)


def test_two_offloads_are_refused():
    """The one of transformers would win, and the file would be empty."""
    model = llama(offload="host")
    with pytest.raises(UnsupportedError, match=r"is checkpointed by another.*omit 'offload'"):
        offload_to_file(model)


def test_the_last_file_is_used():
    model = llama(offload="disk")
    other = offload_to_file(model)
    loss_of(model)
    assert (model.file.nbytes, other.nbytes > 0) == (0, True)


def test_layers_in_turn_are_offloaded():
    model = llama(4)
    model.gradient_checkpointing_enable(every_n_layers=2)
    file = offload_to_file(model)
    loss = loss_of(model)
    assert blocks(file) == 2
    del loss


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no file can be created in .*none: No such file.*Set activation_dir"):
        offload_to_file(llama(), str(tmp_path / "none"))


def test_a_full_disk_is_an_error_in_the_forward_and_training_can_go_on():
    model, plain = llama(offload="disk"), llama()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 4096, limit[1]))  # a part of the second layer is written
    try:
        with pytest.raises(ConfigError, match=r"activation_offload='disk' needs more than 1,\d+,\d+ bytes in .*: File"):
            loss_of(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    train(model)
    train(plain)
    assert_equal(model, plain)
    assert blocks(model.file) == 2
