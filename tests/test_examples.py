"""The examples train. Models defined in an example must get bitwise the weights that torch's optimizers give.
Examples that take a model directory are run with a small model."""

import asyncio
import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from support.nets import same, weights
from support.processes import Launched
from support.runs import assistant, user, write_rows
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowmem
from lowmem import cli

LR = 0.05  # for the Lightning example
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    text = Path(__file__).read_text()
    for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*.ipynb")):
        assert f"test_{path.stem}" in text or f'("{path.stem}", ' in text, path


# -- language models ---------------------------------------------------------------------------------------------------


ROWS = {
    "chats": [{"messages": user(f"What is {n}?") + assistant(f"{n}.")} for n in range(8)],
    "pairs": [{"prompt": user(f"What is {n}?"), "chosen": assistant("A number."), "rejected": assistant("?")}
              for n in range(8)],
    "questions": [{"prompt": user(f"What is {n}?"), "answer": str(n)} for n in range(8)],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Creates a folder with a small model, a tokenizer, a text, and data of each kind."""
    folder = tmp_path_factory.mktemp("examples")
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "text.txt").write_text((ROOT / "README.md").read_text()[:2000])
    script = runpy.run_path(str(ROOT / "scripts" / "make_model.py"))
    tokenizer = script["train_tokenizer"]([(folder / "text.txt").read_text()], 300)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    script["make_model"](folder / "model", tokenizer, num_key_value_heads=2, **sizes)
    return folder


def run(name, folder, data, out, *options, monkeypatch):
    arguments = [str(folder / "model"), str(folder / data), "--output_dir", str(out), *options]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def assert_trained(folder, out):
    """Checks that the saved model loads and that its weights have changed."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    before = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    assert not same(weights(before), weights(model))
    assert all(weight.isfinite().all() for weight in weights(model))
    assert AutoTokenizer.from_pretrained(out).chat_template


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("loop", "text.txt", ["--length", "128"]),
        ("sft", "chats.jsonl", []),
        ("dpo", "pairs.jsonl", ["--learning_rate", "1e-4"]),
        ("grpo", "questions.jsonl", ["--steps", "2", "--max_completion_length", "4"]),
    ],
)
def test_language_models(name, data, options, folder, tmp_path, monkeypatch):
    run(name, folder, data, tmp_path / "out", *options, monkeypatch=monkeypatch)
    assert_trained(folder, tmp_path / "out")


def test_zero3(folder, tmp_path, monkeypatch):
    """Runs two ranks with the arguments of DeepSpeed's launcher, which test_launch.py starts."""
    pytest.importorskip("deepspeed")
    # DeepSpeed 0.19 (comm/torch.py, build_shm_op) would spend two minutes compiling an operator
    (tmp_path / "on_a_cpu.py").write_text(
        "import runpy, deepspeed\n"
        "deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        f"runpy.run_path({str(FOLDER / 'zero3.py')!r}, run_name='__main__')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # inherited by forked processes
    words = ("on_a_cpu", str(folder / "model"), str(folder / "text.txt"), "--length", "128", "--local_rank", "0")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = Launched.ranks(2, *words, "--output_dir", str(tmp_path / "out"), environment=environment).finish()
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    assert_trained(folder, tmp_path / "out")


# -- the notebook ------------------------------------------------------------------------------------------------------


FEWER = {
    "make_docstrings.py": ["--limit", "200"],
    "make_model.py": ["--vocab-size", "512", "--hidden-size", "32", "--layers", "1"],
    "sft": ["--max_steps", "2", "--num_processes", "1", "--use_cpu"],
}


@pytest.fixture
def few_modules(monkeypatch):
    """Hides most modules from scripts that read all of them."""
    path, folder = sysconfig.get_path, str(Path(asyncio.__file__).parent)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *rest: folder if name == "stdlib" else path(name, *rest))


@pytest.mark.usefixtures("few_modules")
def test_scripts_make_the_same_files_each_time(tmp_path, monkeypatch):
    files = []
    for name in "ab":
        data, model = tmp_path / f"{name}.jsonl", tmp_path / name
        for script, words in (
            ("make_docstrings", ["--out", data, "--limit", 50, "--seed", 3]),
            ("make_model", ["--data", data, "--out", model, "--vocab-size", 280, "--hidden-size", 16, "--layers", 1]),
        ):
            monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
            runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
        files.append([data.read_bytes(), {path.name: path.read_bytes() for path in model.iterdir()}])
    assert files[0] == files[1] and files[0][0].count(b"\n") == 50


@pytest.mark.usefixtures("few_modules")
def test_quickstart(tmp_path, monkeypatch):
    """Every cell runs in this process without Jupyter, with fewer rows and steps."""
    pictures = []

    def run(line):
        words = shlex.split(line)
        fewer = FEWER.get(words[2] if words[0] == "-m" else Path(words[0]).name, [])
        monkeypatch.setattr(sys, "argv", [*words, *fewer])
        if words[0] == "-m":
            with pytest.raises(SystemExit) as ended:
                cli.main([*words[2:], *fewer])
            assert ended.value.code == 0, line
        else:
            runpy.run_path(words[0], run_name="__main__")

    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    shown = SimpleNamespace(Image=Path, display=lambda path: pictures.append(path.read_bytes()[:4]))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=(9, 0), get_ipython=lambda: None))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    names = {"run": run}
    for cell in json.loads((FOLDER / "quickstart.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(re.sub(r"(?m)^!\{sys.executable\} (.*)", r"run(r'''\1''')", "".join(cell["source"])), names)
    assert pictures == [b"\x89PNG"]


# -- a GAN -------------------------------------------------------------------------------------------------------------


def test_gan(capsys):
    gan = example("gan")
    torch.manual_seed(0)
    networks = gan.make_networks()
    gan.train(*networks, steps=200)
    assert "step 200: discriminator" in capsys.readouterr().out

    torch.manual_seed(0)
    generator, discriminator = gan.make_networks()
    options = {"lr": 1e-3, "weight_decay": 0.0, "foreach": False}
    opt_g = torch.optim.AdamW(generator.parameters(), **options)
    opt_d = torch.optim.AdamW(discriminator.parameters(), **options)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(200):
        fake = generator(torch.randn(64, gan.NOISE))
        real = discriminator(gan.points_on_a_circle(64))
        opt_d.zero_grad()
        (cross_entropy(real, ones) + cross_entropy(discriminator(fake.detach()), zeros)).backward()
        opt_d.step()
        opt_g.zero_grad()
        cross_entropy(discriminator(fake), ones).backward()
        opt_g.step()
    assert same(weights(*networks), weights(generator, discriminator))


# -- Lightning ---------------------------------------------------------------------------------------------------------


def fit(module, cls, make=None, path=None, **options):
    """Fits a module of the example. With `make`, uses its torch optimizer and Lightning's backward."""
    ordinary = {}
    if make is not None:
        ordinary = {"make_optimizer": make, "backward": module.lightning.LightningModule.backward}
    torch.manual_seed(0)
    loader = module.make_loader()
    net = type(cls.__name__, (cls,), ordinary)()
    trainer = module.make_trainer(**{"max_epochs": 2, **options})
    trainer.fit(net, loader, ckpt_path=path)
    return net, trainer


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=LR, foreach=False)


@pytest.fixture(scope="module")
def lightning_loop():
    return example("lightning_loop")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "precision"), [("Manual", "32-true"), ("Automatic", "bf16-mixed")])
def test_lightning_loop(lightning_loop, kind, precision):
    cls = getattr(lightning_loop, kind)
    got, trainer = fit(lightning_loop, cls, precision=precision)
    want, _ = fit(lightning_loop, cls, adamw, precision=precision)
    assert same(weights(got), weights(want))
    assert trainer.optimizers[0].last_step.step == 14


@pytest.mark.filterwarnings("ignore")
def test_lightning_loop_accumulates_and_clips(lightning_loop):
    """The 7 batches form windows of 3, 3 and 1."""

    def clipping(net):
        config = {"rule": "adamw", "lr": LR, "weight_decay": 0.01, "clip_norm": 0.5}
        return lowmem.FusedOptimizer(net.named_parameters(), model=net, **config)

    options = {"accumulate_grad_batches": 3}
    clipped = type("Automatic", (lightning_loop.Automatic,), {"make_optimizer": clipping})
    got, _ = fit(lightning_loop, clipped, **options)
    want, _ = fit(lightning_loop, lightning_loop.Automatic, adamw, **options, gradient_clip_val=0.5)
    assert same(weights(got), weights(want))


@pytest.mark.filterwarnings("ignore")
def test_lightning_loop_resumes(lightning_loop, tmp_path):
    want, _ = fit(lightning_loop, lightning_loop.Automatic, adamw)
    _, trainer = fit(lightning_loop, lightning_loop.Automatic, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "epoch.ckpt")
    got, trainer = fit(lightning_loop, lightning_loop.Automatic, path=tmp_path / "epoch.ckpt")
    assert trainer.optimizers[0].last_step.step == 14
    assert same(weights(got), weights(want))


# -- diffusers ---------------------------------------------------------------------------------------------------------


class Clipped(torch.optim.AdamW):
    """AdamW that clips gradients before its step, as training scripts do."""

    def step(self, closure=None):
        clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def test_diffusion_loop():
    loop = example("diffusion_loop")

    def run(**make):
        torch.manual_seed(0)
        model = loop.make_model()
        images = torch.randn(20, 1, 8, 8).sign()
        try:
            ema = loop.train(model, torch.utils.data.DataLoader(images, batch_size=4), epochs=2, **make)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        return weights(model) + list(ema.shadow_params)

    got = run()
    want = run(make_optimizer=lambda model: Clipped(model.parameters(), lr=1e-3, foreach=False))
    assert same(got, want)
