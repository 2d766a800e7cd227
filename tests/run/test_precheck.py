"""A run that does not fit in memory raises before its data and weights are loaded."""

from types import SimpleNamespace

import psutil
import pytest
from support import runs
from transformers import LlamaConfig

from lowmem.run import data, precheck

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes the YAML file of a run whose model has no weight files, on a machine with 1.001 GiB of memory."""
    LlamaConfig(**SIZES, vocab_size=4096).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30 + 2**20))
    return runs.write(tmp_path, "sft", model_name_or_path=str(tmp_path / "model"), max_length=32)


def test_a_run_that_does_not_fit_is_refused(config, tmp_path, monkeypatch):
    """The message suggests arguments with which the run fits. No files are left behind."""
    monkeypatch.setattr(data, "load", lambda recipe: pytest.fail("the data was loaded"))
    few = ["--dtype", "bfloat16", "--gradient_checkpointing", "true", "--per_device_train_batch_size", "1"]
    ended = runs.lowmem("sft", "--config", config, *few, "--layers.computed_gradients", "false")
    assert ended.status == 2
    assert "error: the run does not fit: it needs 1." in ended.err and "Use --force to train anyway" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_run_is_forced(config, monkeypatch):
    """The run starts, and then fails because the model's weight files do not exist."""
    monkeypatch.setattr(precheck, "require_fit", lambda recipe: pytest.fail("the run was planned"))
    ended = runs.lowmem("sft", "--config", config, "--force")
    assert ended.status == 2 and "loading the model" in ended.out and "does not fit" not in ended.err


@pytest.mark.usefixtures("planned_here")
def test_a_run_that_fits_says_what_it_needs(config, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    ended = runs.lowmem("sft", "--config", config)
    assert "memory     1." in ended.out and "of 1024.00 GiB per process (planned)" in ended.out
    assert "loading the model" in ended.out and "does not fit" not in ended.err


GROUPS = {
    "version 2": ("0::/job/step\n", "job", "max current", "inactive_file"),
    "version 1": (
        "4:memory:/job/step\n3:cpuset:/\n",
        "memory/job",
        "limit_in_bytes usage_in_bytes",
        "total_inactive_file",
    ),
    "no limit": ("0::/job\n", "job", "", ""),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_limit_of_a_control_group_counts(case, tmp_path, monkeypatch):
    """SLURM sets the limit on the group of a job, a parent of this process's group."""
    groups, folder, names, stat = GROUPS[case]
    (tmp_path / "groups").write_text(groups)
    (tmp_path / folder / "step").mkdir(parents=True)
    for name, number in zip(names.split(), (3 << 30, 2 << 30), strict=bool(names)):
        (tmp_path / folder / f"memory.{name}").write_text(f"{number}\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 1\n{stat} {1 << 30}\n" if stat else "")
    monkeypatch.setattr(precheck, "_OWN_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(precheck, "_GROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=128 << 30))
    assert precheck.free_on_host() == (2 << 30 if names else 128 << 30)


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize("weights", [0, 2**20])
def test_a_small_model_and_a_command_without_a_plan_are_trained(config, tmp_path, monkeypatch, weights):
    """Without weight files, lowmem tries to plan the run and prints why it cannot."""
    if weights:
        (tmp_path / "model" / "model.safetensors").write_bytes(bytes(weights))
    ended = runs.lowmem("sft", "--config", config, "--torch_compile", "true")
    assert ("memory     not planned: torch_compile cannot be planned" in ended.out) == (not weights)
