"""Shared fixtures, and the hooks that run the tests on a GPU, with compiled updates, or as a sample."""
# ruff: noqa: E402 (a simulated GPU is installed before torch is imported)

import gc
import logging
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

# These are read when packages are imported, here and in processes that tests start. Tests run in parallel, and their
# tensors are too small to benefit from a second thread. Compiled code is cached for all processes and later runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"lowmem-tests-inductor-{os.getuid()}")
)
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # do not start processes that import torch only to compile

# Options of scripts/test.sh: run on a GPU (--gpu) or on a number of simulated GPUs (--simgpu), with compiled
# updates of any size (--compiled, see support/compiled.py), or with one in EVERY of the engine's tests (--stack).
# Kernels for a GPU run in Triton's interpreter (TRITON_INTERPRET=1, see support/interpreted.py).
SIMGPUS = int(os.environ.get("LOWMEM_SIMGPU", "0"))
ON_GPU = bool(SIMGPUS) or os.environ.get("LOWMEM_GPU") == "1"
EVERY = int(os.environ.get("LOWMEM_EVERY", "1"))
if SIMGPUS:
    from support import simgpu

    simgpu.install(SIMGPUS)  # set before importing torch, which looks for CUDA on import

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
# do not fail an example because the machine is slow or busy
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def reset_log_level():
    """Restores the log level, which `lowmem rules` changes."""
    yield
    logging.getLogger("lowmem").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def freeze_imported_objects():
    """Freezes imported objects. Otherwise Accelerate's garbage collection takes most of a second in every `train`."""
    gc.collect()
    gc.freeze()


# Folders whose tests create tensors on the default device. Trainers move models to a GPU by themselves.
ON_DEFAULT_DEVICE = {"layers", "rules", "step", "tiles"}


@contextmanager
def default_device(path):
    """Makes the GPU, if the tests run on one, the default device while a file is imported and its tests run."""
    if ON_GPU and path.parent.name in ON_DEFAULT_DEVICE:
        torch.set_default_device("cuda")
    try:
        yield
    finally:
        if ON_GPU:
            torch.set_default_device(None)


@pytest.fixture(autouse=True)
def gpu(request, monkeypatch):
    """On a GPU, compares tensors up to rounding. On a simulated GPU, requires that there are no races and no reads of
    uninitialized memory.
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
    """Requires that tracing never failed for an update of the package's own rules."""
    yield
    module = sys.modules.get("lowmem.step.compiled")
    for rule, updates in module._TRACED.items() if module else ():
        of_package = (rule if isinstance(rule, type) else type(rule)).__module__.startswith("lowmem.")
        assert None not in updates.values() or not of_package, f"updates of {rule} are not compiled"


def reasons_to_skip(item):
    """Yields the reasons to skip a test with the chosen options."""
    if ON_GPU:
        for marker in item.iter_markers("cpu_only"):
            yield f"on a CPU only: {marker.args[0]}"
        if "ranks_of" in item.fixturenames:
            yield "on a CPU only: ranks are processes that meet over gloo"
    if compiled.FORCED or compiled.INTERPRETED:
        for marker in item.iter_markers("by_tiles"):
            yield f"by tiles only: {marker.args[0]}"


def pytest_collection_modifyitems(items):
    """Skips tests. With EVERY, keeps a sample of the engine's tests, which is the same for all stacks."""
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
    """Checks that a test marked with headings of docs/how-to/troubleshooting.md produces the messages quoted there."""
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
    """Removes rules and storages that a test, or a page or study that it runs, has registered."""
    from lowmem.rules.rule import TABLE as RULES
    from lowmem.tiles.storage import TABLE as STORAGES

    tables = [(table, dict(table)) for table in (RULES, STORAGES)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.fixture(scope="session")
def ranks_of():
    """Returns a function that runs code on `count` ranks. The processes are started once for all tests."""
    groups = {}

    def of(count):
        if count not in groups:
            groups[count] = Ranks(count)
        return groups[count]

    yield of
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
    """Returns a factory that creates the same small Llama for the same arguments."""

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
    """Returns a factory that creates `count` batches of random token ids as keyword arguments of a language model."""

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
    """Plans in this process, which saves the imports in a new one."""

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
    """Records the shapes of the logits that are computed."""
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
