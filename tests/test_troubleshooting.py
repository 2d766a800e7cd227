"""docs/how-to/troubleshooting.md: a function per entry provokes its message, or shows its symptom and the way out."""

import copy
import gc
import inspect
import logging
import math
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.errors import LowmemError
from lowmem.hf import agreement, failures, optim
from lowmem.hf.checkpoint import check_checksums, write_checksums
from lowmem.hf.dry_runs import check_borders
from lowmem.layers.head import linear_cross_entropy
from lowmem.layers.mlp import tile_mlps
from lowmem.rules.lomo import Lomo
from lowmem.run import build, data
from lowmem.run.boundary import is_out_of_memory
from lowmem.run.folder import LOCK, RunFolder
from lowmem.run.recipe import parse

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "troubleshooting.md").read_text()
HEADINGS = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
ENTRIES = {}


def entry(heading):
    """A function that provokes a message raises it or returns it; one that shows a symptom asserts it."""

    def register(function):
        assert heading not in ENTRIES
        ENTRIES[heading] = function
        return function

    return register


def test_every_entry_is_provoked():
    assert list(ENTRIES) == HEADINGS


@pytest.mark.parametrize("heading", HEADINGS)
def test_entry(heading, request):
    function = ENTRIES[heading]
    fixtures = [request.getfixturevalue(name) for name in inspect.signature(function).parameters]
    try:
        message = function(*fixtures)
    except LowmemError as error:
        message = str(error)
    if heading.startswith("`"):
        parts = map(re.escape, heading.strip("`").split("..."))
        assert re.search(".*".join(parts), message), message
    else:
        assert message is None


def test_every_entry_has_a_line_to_write():
    for heading, text in re.findall(r"^### (.+)\n\n((?:(?!#).*\n?)*)", PAGE, re.MULTILINE):
        assert text.count("`") >= 2, heading


def make_net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net):
    return net(torch.ones(2, 3)).square().mean()


def lomo(net, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), **{"rule": "lomo", "lr": 0.1, "model": net, **options})


@pytest.fixture
def net():
    return make_net()


@pytest.fixture
def opt(net):
    return lomo(net)


@contextmanager
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- the order of calls in a step --------------------------------------------------------------------------------------


@entry("`... backwards came before this step(), and each of them has updated the weights`")
def backwards_before_step(net, opt):
    loss_of(net).backward()
    loss_of(net).backward()
    opt.step()


@entry("`a second backward before step()`")
def second_backward(net, opt):
    opt.backward(loss_of(net))
    opt.step()
    opt.backward(loss_of(net))
    opt.backward(loss_of(net))


@entry("`zero_grad() before step(): it would drop a gradient that backward has already used`")
def zero_grad_before_step(net, opt):
    opt.backward(loss_of(net))
    opt.step()
    opt.backward(loss_of(net))
    opt.zero_grad()


@entry("`cannot save in the middle of step ...: ... micro-batch(es) have been accumulated, but the last backward`")
def save_between(net, opt):
    with opt.accumulate():
        opt.backward(loss_of(net))
    opt.state_dict()


@entry("`step ... is torn`")
def torn(net):
    opt = lomo(net, batching=False)
    net[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.backward(loss_of(net))
    opt.state_dict()


@entry("`parameter ... already has a gradient in .grad`")
def leftover(net):
    loss_of(net).backward()
    opt = lomo(net)
    opt.backward(loss_of(net))


@entry("`step() would update parameter ... with the gradient in .grad, but`")
def given(net):
    opt = lomo(net, loss_scale=2.0)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    opt.step()


@entry("`backward() of an optimizer that was removed by remove()`")
def removed(net, opt):
    opt.remove()
    opt.backward(loss_of(net))


# -- the loss ----------------------------------------------------------------------------------------------------------


@entry("`the loss has no graph`")
def no_graph(net, opt):
    with torch.no_grad():
        loss = loss_of(net)
    opt.backward(loss)


@entry("`the loss is of shape ...; it must be a tensor of one element`")
def not_a_scalar(net, opt):
    opt.backward(net(torch.ones(2, 3)))


@entry("`no parameter of this optimizer got a gradient`")
def another_model(net, opt):
    opt.backward(loss_of(copy.deepcopy(net)))


@entry("`policy 'two_pass' needs more than one plain loss.backward()`")
def plain_two_pass(net):
    opt = lomo(net, clip_norm=1.0)
    assert opt.policy == "two_pass"
    loss_of(net).backward()


@entry("`with a loss scale the loss must be scaled: call opt.backward(loss)`")
def plain_with_scale(net):
    opt = lomo(net, loss_scale=8.0)
    assert opt.loss_scale == 8.0
    loss_of(net).backward()


@entry("`a GradScaler has scaled the loss`")
def grad_scaler(net, opt):
    opt.backward(torch.amp.GradScaler("cpu").scale(loss_of(net)))


@entry("`the loss scale cannot back off below its minimum`")
def hopeless(net):
    opt = lomo(net, loss_scale=lowmem.DynamicScale(init_scale=1.0, min_scale=1.0))
    for _ in range(2):
        opt.backward(loss_of(net) * float("inf"))


# -- gradients and clipping --------------------------------------------------------------------------------------------


@entry("`clip_grad_norm_(): parameter ... has no gradient`")
def clip_after_backward(net, opt):
    opt.backward(loss_of(net))
    clip_grad_norm_(net.parameters(), 1.0)


@entry("`policy 'immediate' updates a parameter before the norm over all gradients is known`")
def immediate_clips():
    lomo(make_net(), policy="immediate", clip_norm=1.0)


@entry("`policy 'two_pass' cannot accumulate gradients`")
def two_pass_accumulates():
    with lomo(make_net(), policy="two_pass", clip_norm=1.0).accumulate():
        pass


class Tied(nn.Module):
    """A weight inside and outside of a region with reentrant checkpointing."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self):
        x = self.first(torch.ones(2, 3))
        return self.shared(checkpoint(self.shared, x, use_reentrant=True)).square().mean()


@entry("`got its gradient in two parts within one backward`")
def two_parts():
    net = Tied()
    opt = lomo(net)
    opt.backward(net())


@entry("`reentrant activation checkpointing runs one backward inside another`")
def reentrant(net, opt):
    assert opt.policy == "immediate"
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(net, x, use_reentrant=True).square().mean().backward()


# -- layers and long sequences -----------------------------------------------------------------------------------------


@entry("`head_memory=... bytes is not enough for one row of a vocabulary matrix`")
def no_row():
    linear_cross_entropy(torch.ones(3, 48), torch.ones(9, 48), torch.zeros(3, dtype=torch.int64), memory=700)


@entry("`has no MLP that can be tiled`")
def no_mlp():
    tile_mlps(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), 16)


@entry("`a sample depends on the samples before it in its row`")
def across_borders(tiny_llama):
    def collate(samples):  # as TRL does, without the position ids that say where samples begin
        return {"input_ids": torch.tensor([[*samples[0]["input_ids"], *samples[1]["input_ids"]]])}

    check_borders(tiny_llama(), collate, torch.device("cpu"))


class Twice(Lomo):
    def update(self, sweep, *args):
        super().update(sweep, *args)
        return super().update(sweep, *args)


@entry("`this rule reads the gradient once more after it has written the weight`")
def read_after_written():
    head, hidden = nn.Linear(64, 512, bias=False), torch.ones(3, 64)
    opt = lomo(head, rule=Twice())
    opt.backward(linear_cross_entropy(hidden, head.weight, torch.zeros(3, dtype=torch.int64)))


# -- the command line and its data -------------------------------------------------------------------------------------


@entry("`unknown key ...`")
def unknown_key(tmp_path):
    (tmp_path / "config.yaml").write_text("learning_rat: 1e-3\n")
    parse("sft", ["--config", str(tmp_path / "config.yaml")])


@entry("`of the launcher`")
def launcher():
    parse("sft", ["--num_processes", "8"])


@entry("`is the default of ... for AdamW, but the rule is`")
def default_rate(tmp_path):
    optim.learning_rate(trl.SFTConfig(str(tmp_path), bf16=False), lowmem.FusedConfig(rule="adalomo"), make_net())


@entry("`is the name of a file`")
def file_name(tmp_path):
    data.load(parse("sft", ["--dataset_name", "chats.jsonl", "--output_dir", str(tmp_path)]))


def tokenized(labels, loaded):
    rows = datasets.Dataset.from_dict({"input_ids": labels, "labels": labels})
    args = SimpleNamespace(max_length=2, train_batch_size=1, dataloader_drop_last=False)
    model = torch.nn.Linear(1, 1)
    model.config = transformers.LlamaConfig()
    tokenizer = SimpleNamespace(pad_token_id=0)
    trainer = SimpleNamespace(train_dataset=rows, args=args, processing_class=tokenizer, model=model)
    return data.check(trainer, datasets.Dataset.from_dict({"text": loaded}))


@entry("`none of the ... tokens in ... rows contributes to the loss`")
def nothing_trained():
    tokenized([[-100, -100]], ["a"])


@entry("`max_length=... leaves none of ... rows`")
def cut_off():
    tokenized([], ["a", "b"])


@entry("`row ... of the data cannot be tokenized`")
def no_text():
    build._by_row(lambda rows: rows.map(lambda row: row["text"].strip()), datasets.Dataset.from_dict({"text": [None]}))


@entry("`already contains a run`")
def occupied(tmp_path):
    (tmp_path / "config.yaml").touch()
    with RunFolder(tmp_path).opened():
        pass


# -- several optimizers and models -------------------------------------------------------------------------------------


@entry("`is already updated by another FusedOptimizer`")
def taken(net, opt):
    assert opt.last_step is None
    lomo(net)


@entry("`this backward reaches parameter ... of another FusedOptimizer`")
def reaches_another(net):
    first, last = lomo(net[0]), lomo(net[2])
    assert first.placement == last.placement
    last.backward(loss_of(net))


@entry("`a FusedOptimizer was deleted before its first step`")
def deleted():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lomo(make_net())
        gc.collect()
    return " ".join(str(warning.message) for warning in caught)


@entry("`a FusedOptimizer cannot be copied or pickled`")
def copied():
    copy.deepcopy(lomo(make_net()))


@entry("`rule ... has no hyperparameter ...`")
def unknown_hyperparameter():
    lomo(make_net(), betas=(0.9, 0.99))


# -- several devices ---------------------------------------------------------------------------------------------------


@entry("`the model is inside DistributedDataParallel`")
def wrapped(tmp_path):
    with one_rank(tmp_path):
        lomo(nn.parallel.DistributedDataParallel(make_net()), placement="replicated")


def seeded_by_rank(rank):
    torch.manual_seed(rank)
    with pytest.raises(LowmemError) as raised:
        lomo(make_net())
    return str(raised.value)


@entry("`the values of the parameters differ between rank 0 and rank ...`")
def other_weights(two):
    return two.run(seeded_by_rank)[0]


@entry("`fully_shard sharded the model after its optimizer was created`")
def sharded_later(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_rank(tmp_path):
        net = make_net()
        opt = lomo(net)
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        opt.backward(loss_of(net))


@entry("`deepspeed: zero_optimization.stage is ...; set it to 3`")
def stage_two():
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from lowmem.hf.sharding import Zero3Sharding

    try:
        Zero3Sharding(SimpleNamespace(hf_deepspeed_config=HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})))
    finally:
        unset_hf_deepspeed_config()


@entry("`fsdp: version 1 stores parameters in flat buffers`")
def fsdp_one():
    from lowmem.hf.sharding import FSDP2Sharding

    FSDP2Sharding(SimpleNamespace(fsdp_plugin_args={"fsdp_version": 1}))


@entry("`this process was started alone, so there are no ranks to shard the model over`")
def alone():
    from lowmem.hf.sharding import FSDP2Sharding

    FSDP2Sharding(SimpleNamespace(fsdp_plugin_args={"fsdp_version": 2}, fsdp_config={})).prepare(torch.float32)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@entry("`No valid checkpoint found in output directory (...)`")
def no_checkpoint(tmp_path):
    from lowmem.hf.checkpoint import find_last

    (tmp_path / "checkpoint-3").mkdir()
    find_last(tmp_path)


@entry("`It contains only weights, so training cannot resume from it`")
def only_weights(tmp_path, tiny_llama):
    from lowmem.hf.checkpoint import check_resumable

    tiny_llama().save_pretrained(tmp_path)
    check_resumable(tmp_path)


@entry("`the saved optimizer has rule ..., but this one has ...`")
def another_rule(net):
    saved = lomo(net).state_dict()
    lomo(net, rule="adamw").load_state_dict(saved)


@entry("`the saved state ... belongs to the weight ... in ..., but in this model the weight is ...`")
def another_dtype():
    net = make_net().bfloat16()
    opt = lomo(net, rounding="compensated")
    opt.backward(net(torch.ones(2, 3, dtype=torch.bfloat16)).float().sum())
    saved = opt.state_dict()
    opt.remove()
    lomo(net.float(), rounding="compensated").load_state_dict(saved)


@entry("`the saved optimizer has ... group(s) of ... parameters, but this one has ...`")
def other_parameters(net):
    saved = lomo(net).state_dict()
    lomo(net[0]).load_state_dict(saved)


@entry("`is damaged: its checksum differs from the one in checksums.txt`")
def flipped(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_checksums(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    check_checksums(tmp_path)


@entry("`checksums.txt is missing`")
def no_checksums(tmp_path):
    check_checksums(tmp_path)


@entry("`is in use by another run`")
def used_by_another(tmp_path):
    code = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / LOCK], stdin=PIPE, stdout=PIPE) as other:
        other.stdout.readline()
        try:
            with RunFolder(tmp_path).opened():
                pass
        finally:
            other.kill()


@entry("`is a symbolic link, and writing would change its target`")
def linked(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with RunFolder(tmp_path).opened():
        pass


@entry("`the tokenized data differs from the data of this checkpoint`")
def other_data(make, tmp_path):
    make(max_steps=1, save_strategy="steps", save_steps=1).train()
    resumed = make(max_steps=2)
    resumed.train_dataset = resumed.train_dataset[1:]
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


@entry("`cannot be continued with the remaining rows`")
def other_rows(make, tmp_path):
    make(max_steps=1, save_strategy="steps", save_steps=1).train()
    make(max_steps=2, seed=1).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


# -- faults ------------------------------------------------------------------------------------------------------------


@entry("`the last ... steps had non-finite gradients`")
def never_finite(net):
    opt = lomo(net, max_nonfinite_steps=2)
    for _ in range(3):
        opt.backward(loss_of(net) * math.nan)


def started_with(rank):
    try:
        agreement.refuse_other_settings({"the number of training samples": 40 + rank})
    except LowmemError as error:
        return str(error)


@entry("`Ranks that train one model need the same options and hyperparameters`")
def not_alike(two):
    return two.run(started_with)[0]


def saving_apart(rank, folder):
    try:
        agreement.check_shared(Path(folder) / str(rank))
    except LowmemError as error:
        return str(error)


@entry("`output_dir: the machines do not share this directory`")
def disks_of_their_own(two, tmp_path):
    return two.run(saving_apart, str(tmp_path))[0]


def timed_out(rank):
    try:
        with failures.explained():
            raise RuntimeError("[/third_party/gloo/gloo/unbound_buffer.cc:81] Timed out waiting 6000ms for recv")
    except LowmemError as error:
        return str(error)


@entry("`another rank did not answer in time`")
def hanging(two):
    return two.run(timed_out)[0]


@entry("`out of memory`")
def no_memory(net, opt):
    net[0].weight.register_hook(lambda grad: grad.new_empty(2**60))
    try:
        opt.backward(loss_of(net))
    except RuntimeError as error:
        assert is_out_of_memory(error)
    return "out of memory"


# -- symptoms without an error -----------------------------------------------------------------------------------------


@entry("The weights do not move")
def only_micro_batches(net):
    opt, before = lomo(net), net[0].weight.detach().clone()
    for _ in range(3):
        with opt.accumulate():
            opt.backward(loss_of(net))
    assert opt.last_step is None
    assert torch.equal(net[0].weight, before)
    opt.step()
    assert opt.last_step.step == 1
    assert not torch.equal(net[0].weight, before)


@entry("The gradient norm is 0.0, or `.grad` is None")
def no_grad():
    net, other = make_net(), make_net()
    other.load_state_dict(net.state_dict())
    opt = lomo(net)
    opt.backward(loss_of(net))
    assert get_total_norm(param.grad for param in net.parameters() if param.grad is not None) == 0.0
    loss_of(other).backward()
    grads = [param.grad for param in other.parameters()]
    torch.testing.assert_close(opt.last_step.grad_norm, get_total_norm(grads))
    torch.testing.assert_close(opt.last_step.norms, torch.stack([grad.norm() for grad in grads]))


@entry("The loss is NaN from some step on")
def not_finite(caplog):
    caplog.set_level(logging.WARNING)
    net = make_net()
    opt = lomo(net)
    net[2].bias.register_hook(lambda grad: grad * float("nan"))
    opt.backward(loss_of(net))
    assert opt.last_step.nonfinite == ["2.bias"]
    assert opt.nonfinite_steps == 1


@entry("The loss is 0.0 or NaN from the first step on")
def no_labels(tiny_llama):
    ids = torch.ones(1, 4, dtype=torch.int64)
    model, labels = tiny_llama(), torch.full_like(ids, -100)
    assert model(input_ids=ids, labels=labels).loss.isnan()
    assert model(input_ids=ids, labels=labels, num_items_in_batch=4).loss == 0.0


@entry("bfloat16 weights stop learning")
def rounded_away():
    def trained(rounding):
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        opt = lowmem.FusedOptimizer([("param", param)], rule="lomo", lr=1e-4, rounding=rounding, seed=0)
        for _ in range(100):
            opt.backward(param.sum())
        return float(param.detach().float().mean())

    assert trained("nearest") == 1.0
    assert trained("stochastic") == pytest.approx(0.99, abs=5e-4)
    assert trained("compensated") == pytest.approx(0.99, abs=2e-3)


@entry("The first step takes longer than the others")
def compiled():
    assert lomo(make_net(), compile=True).compiled
    opt = lomo(make_net(), compile=False)
    assert not opt.compiled
    assert opt.compile_seconds >= 0.0


@entry("Out of memory although `lowmem plan` says that it fits, or nvidia-smi shows more")
def not_counted():
    from lowmem.run.plan import NOT_COUNTED

    for part in ("CUDA's context", "fragmentation", "workspaces of", "evaluation"):
        assert part in NOT_COUNTED["gpu"]
        assert part in PAGE
