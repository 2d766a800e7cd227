"""Shared fixtures, and pytest hooks that run the tests on a GPU, with compiled updates, or as a sample."""
# ruff: noqa: E402 (a simulated GPU must be installed before torch is imported)

import gc
import logging
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

# Packages read these variables when they are imported, in this process and in processes that tests start. One thread is
# used because tests run in parallel and their tensors are small. All processes and later runs share compiled code.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"lowmem-tests-inductor-{os.getuid()}")
)
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # do not start processes that import torch only to compile

# Options of scripts/test.sh: run the tests on a GPU (--gpu) or on simulated GPUs (--simgpu), compile all updates
# (--compiled, see support/compiled.py), or run only one of EVERY tests of the engine (--stack). TRITON_INTERPRET=1 runs
# GPU kernels in Triton's interpreter (see support/interpreted.py).
SIMGPUS = int(os.environ.get("LOWMEM_SIMGPU", "0"))
ON_GPU = bool(SIMGPUS) or os.environ.get("LOWMEM_GPU") == "1"
EVERY = int(os.environ.get("LOWMEM_EVERY", "1"))
if SIMGPUS:
    from support import simgpu

    simgpu.install(SIMGPUS)  # before the import of torch, which looks for CUDA

import hypothesis
import pytest
import torch
from matplotlib.figure import Figure
from support import compiled, nets, processes, rounded, troubleshooting
from support.devices import seeded
from support.ranks import Ranks
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.stacks import ENGINE

torch.set_num_threads(1)
compiled.force()
# an example must not fail because the machine is slow or busy
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def reset_log_level():
    """Restores the log level after each test, because `lowmem rules` changes it."""
    yield
    logging.getLogger("lowmem").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def freeze_imported_objects():
    """Excludes imported objects from garbage collection, which Accelerate otherwise runs for up to a second per run."""
    gc.collect()
    gc.freeze()


# Directories of tests that create tensors on the default device. (Trainers move models to a GPU.)
ON_DEFAULT_DEVICE = {"layers", "rules", "step", "tiles"}


@contextmanager
def default_device(path):
    """If the tests run on a GPU, makes it the default device during the import and the tests of a file."""
    if ON_GPU and path.parent.name in ON_DEFAULT_DEVICE:
        torch.set_default_device("cuda")
    try:
        yield
    finally:
        if ON_GPU:
            torch.set_default_device(None)


@pytest.fixture(autouse=True)
def gpu(request, monkeypatch):
    """On a real GPU, `torch.equal` ignores rounding errors. On a simulated GPU, a test fails if it causes a race or
    reads uninitialized memory.
    """
    with default_device(request.path):
        if not SIMGPUS:
            if ON_GPU:
                monkeypatch.setattr(torch, "equal", rounded.equal)
            yield
            return
        monkeypatch.setattr("lowmem.step.compiled.has_compiler", lambda device: False)  # simulated GPUs have none
        with simgpu.watch("race", "unwritten") as findings:
            yield
        assert not findings, simgpu.summary(findings)


@pytest.fixture(autouse=True)
def traceable():
    """Requires after each test that all updates of lowmem's rules could be traced."""
    yield
    module = sys.modules.get("lowmem.step.compiled")
    for rule, updates in module._TRACED.items() if module else ():
        third_party = not (rule if isinstance(rule, type) else type(rule)).__module__.startswith("lowmem.")
        assert None not in updates.values() or third_party, f"updates of {rule} are not compiled"


def reasons_to_skip(item):
    """Yields the reasons for which the selected options skip a test."""
    if ON_GPU:
        for marker in item.iter_markers("cpu_only"):
            yield f"on a CPU only: {marker.args[0]}"
        if "ranks_of" in item.fixturenames:
            yield "on a CPU only: ranks are processes of a gloo group"
    if compiled.FORCED or compiled.INTERPRETED:
        for marker in item.iter_markers("by_tiles"):
            yield f"by tiles only: {marker.args[0]}"


def pytest_collection_modifyitems(items):
    """Skips tests, and selects a sample of the engine's tests if EVERY > 1. The sample is the same on all stacks."""
    for item in items:
        for reason in reasons_to_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = [item for item in items if not ENGINE.match(item.nodeid) or crc32(item.nodeid.encode()) % EVERY == 0]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    with default_device(collector.path):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Checks that a test with `troubleshooting` marks produces the messages that their headings quote."""
    headings = [mark.args[0] for mark in pyfuncitem.iter_markers("troubleshooting")]
    if not headings:
        return (yield)
    with troubleshooting.heard() as messages:
        result = yield
    for words in headings:
        troubleshooting.check(words, messages)
    return result


@pytest.fixture(autouse=True)
def restore_registries():
    """Removes the rules and storages that a test has registered, for example by running code of a page."""
    from lowmem.rules.rule import TABLE as RULES
    from lowmem.tiles.storage import TABLE as STORAGES

    tables = [(table, dict(table)) for table in (RULES, STORAGES)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.fixture(scope="session")
def ranks_of():
    """Returns a function that returns `Ranks` for a count. Their processes are started once for all tests."""
    groups = {}

    def ranks(count):
        if count not in groups:
            groups[count] = Ranks(count)
        return groups[count]

    yield ranks
    for group in groups.values():
        group.stop()


@pytest.fixture(params=[2, 3], ids=lambda n: f"{n} ranks")
def ranks(request, ranks_of):
    return ranks_of(request.param)


@pytest.fixture
def two(ranks_of):
    return ranks_of(2)


@pytest.fixture(scope="session")
def tiny_llama():
    """Returns a factory of small Llamas, whose weights are the same for the same arguments."""

    def make(dtype=torch.float32, checkpointing=False, **config):
        sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "use_cache": False, **config})).to(dtype)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    return make


@pytest.fixture(scope="session")
def token_batches():
    """Returns a factory of `count` batches of random token ids, as keyword arguments of a language model."""

    def make(count, size=(2, 16), vocab_size=97):
        source = seeded(1)
        drawn = [torch.randint(vocab_size, size, generator=source) for _ in range(count)]
        return [{"input_ids": ids, "labels": ids} for ids in drawn]

    return make


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def sketched_pictures(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", processes.sketch)


@pytest.fixture
def planned_here(monkeypatch):
    """Makes plans run in this process, which is faster because packages are already imported."""

    from support import runs

    from lowmem.run import precheck

    def run(words, **_):
        ended = runs.lowmem(*words[3:])
        return SimpleNamespace(returncode=ended.status, stdout=ended.out, stderr=ended.err)

    monkeypatch.setattr(precheck, "subprocess", SimpleNamespace(run=run))


@pytest.fixture(scope="session")
def give_gradients():
    return nets.give_gradients


@pytest.fixture
def matrices(monkeypatch):
    """Returns a list to which the shape of each computed matrix of logits is appended."""
    from lowmem.layers.logits import Logits

    shapes, compute = [], Logits.matrix
    monkeypatch.setattr(Logits, "matrix", lambda self: (shapes.append(self.source.shape), compute(self))[1])
    return shapes


@pytest.fixture
def samples():
    return [{"input_ids": row, "labels": row} for row in torch.randint(97, (40, 12))]


@pytest.fixture
def make(tiny_llama, samples, tmp_path):
    """Returns a factory of trainers of a small Llama. Keyword arguments are training arguments."""

    def factory(cls=None, model=None, fused=None, run="run", optimizers=(None, None), **arguments):
        from transformers import Trainer, TrainingArguments

        from lowmem.trainer import FusedTrainer, FusedTrainerMixin

        cls = cls or FusedTrainer
        defaults = {
            "output_dir": str(tmp_path / run), "max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
            "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0, "report_to": "none", "disable_tqdm": True,
            "optim": "adamw_torch" if cls is Trainer else "adamw_torch_fused", "dataloader_pin_memory": False,
        }  # fmt: skip
        keywords = {"fused": fused} if issubclass(cls, FusedTrainerMixin) else {}
        return cls(
            model=model or tiny_llama(attention_dropout=0.1),
            args=TrainingArguments(**{**defaults, **arguments}),
            train_dataset=samples,
            eval_dataset=samples[:8],
            optimizers=optimizers,
            **keywords,
        )

    return factory
