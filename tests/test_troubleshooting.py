"""Each heading of docs/how-to/troubleshooting.md has a marked test. This file tests symptoms and errors of ranks."""

import re
from pathlib import Path

import pytest
import torch
from support.troubleshooting import HEADINGS, PAGE, heading
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowmem
from lowmem.errors import LowmemError
from lowmem.hf import processes
from lowmem.run.plan import RESERVE

MARK = re.compile(r'(?:mark\.troubleshooting|explained)\(\s*"(.*?)"')


def make_net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net):
    return net(torch.ones(2, 3)).square().mean()


def lomo(net, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), **{"rule": "lomo", "lr": 0.1, "model": net, **options})


def test_every_heading_has_a_test():
    files = Path(__file__).parent.rglob("test_*.py")
    carried = {heading(words) for path in files for words in MARK.findall(path.read_text())}
    carried |= {title for title in HEADINGS if title.strip("`").startswith(tuple(OF_RANKS))}
    assert {*HEADINGS} == carried


def test_every_entry_has_a_line_to_copy():
    for title, text in re.findall(r"^### (.+)\n\n((?:(?!#).*\n?)*)", PAGE, re.MULTILINE):
        assert text.count("`") >= 2, title


# -- messages of ranks -------------------------------------------------------------------------------------------------


def wrapped(rank, folder):
    lomo(nn.parallel.DistributedDataParallel(make_net()), placement="replicated")


def other_weights(rank, folder):
    torch.manual_seed(rank)
    lomo(make_net())


def sharded_later(rank, folder):
    torch.manual_seed(0)
    net = make_net()
    opt = lomo(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    opt.backward(loss_of(net))


def started_otherwise(rank, folder):
    processes.require_equal_settings({"the number of training samples": 40 + rank})


def saving_apart(rank, folder):
    processes.require_shared_disk(Path(folder) / str(rank))


def timed_out(rank, folder):
    with processes.explained():
        raise RuntimeError("[/third_party/gloo/gloo/unbound_buffer.cc:81] Timed out waiting 6000ms for recv")


OF_RANKS = {
    "the model is inside DistributedDataParallel": wrapped,
    "the values of the parameters differ between rank 0 and rank": other_weights,
    "fully_shard sharded the model after its optimizer was created": sharded_later,
    "Ranks that train one model need": started_otherwise,
    "output_dir: the machines do not share": saving_apart,
    "another rank did not answer in time": timed_out,
}


def message_of(rank, function, folder):
    try:
        function(rank, folder)
    except LowmemError as error:
        return str(error)


@pytest.mark.parametrize("words", OF_RANKS)
def test_every_rank_gets_the_message(words, two, tmp_path):
    for message in two.run(message_of, OF_RANKS[words], str(tmp_path)):
        assert words in message


# -- symptoms ----------------------------------------------------------------------------------------------------------


@pytest.mark.troubleshooting("The weights do not move")
def test_micro_batches_without_a_last_one_change_no_weight():
    net = make_net()
    opt, before = lomo(net), net[0].weight.detach().clone()
    for _ in range(3):
        with opt.accumulate():
            opt.backward(loss_of(net))
    assert opt.last_step is None and torch.equal(net[0].weight, before)
    opt.step()
    assert opt.last_step.step == 1 and not torch.equal(net[0].weight, before)


@pytest.mark.troubleshooting("The loss is 0.0 or NaN from the first step on")
def test_a_loss_without_labels(tiny_llama):
    ids = torch.ones(1, 4, dtype=torch.int64)
    model, labels = tiny_llama(), torch.full_like(ids, -100)
    assert model(input_ids=ids, labels=labels).loss.isnan()
    assert model(input_ids=ids, labels=labels, num_items_in_batch=4).loss == 0.0


@pytest.mark.troubleshooting("The first step takes longer")
def test_the_time_of_compiling_is_reported():
    assert lomo(make_net(), compile=True).compiled
    net = make_net()
    opt = lomo(net, compile=False)
    before = opt.compile_seconds  # for all optimizers in the process
    opt.backward(loss_of(net))
    assert not opt.compiled and opt.compile_seconds == before


@pytest.mark.troubleshooting("Out of memory although")
def test_memory_a_plan_does_not_count_is_documented():
    assert f"a reserve of {RESERVE['gpu'] / 2**30:g} GiB" in PAGE
