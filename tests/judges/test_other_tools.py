"""axolotl and LLaMA-Factory train with fused updates, set up and started as in docs/how-to/convert.md.

Each needs a separate environment in which lowmem and pytest are installed.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from scripts.make_model import make_model, train_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "convert.md").read_text()
TEXTS = re.findall(r"[A-Z][^\n|`]{20,80}", PAGE)[:24]

# With clipping, accumulation, weight decay and a schedule.
COMMON = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1, "max_grad_norm": 1.0,
          "weight_decay": 0.1, "warmup_steps": 1, "learning_rate": 1e-3, "seed": 1}  # fmt: skip


def axolotl(folder):
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in TEXTS]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(folder / "chats.jsonl"), "ds_type": "json", "type": "chat_template"}
    return {
        **COMMON, "base_model": str(folder / "model"), "datasets": [data], "sequence_len": 128, "micro_batch_size": 2,
        "optimizer": "adamw_torch", "lr_scheduler": "cosine", "bf16": False, "tf32": False, "val_set_size": 0,
        "gradient_checkpointing": False, "dataset_prepared_path": str(folder / "prepared"),
    }  # fmt: skip


def llamafactory(folder):
    rows = [{"instruction": text, "input": "", "output": text} for text in TEXTS]
    (folder / "chats.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.json"}}))
    return {
        **COMMON, "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True, "cutoff_len": 128,
        "finetuning_type": "full", "dataset_dir": str(folder), "dataset": "chats", "template": "default",
        "per_device_train_batch_size": 2, "optim": "adamw_torch", "lr_scheduler_type": "cosine", "report_to": "none",
        "disable_gradient_checkpointing": True, "use_cpu": True,
    }  # fmt: skip


AXOLOTL = ["-m", "axolotl.cli.main", "train", "--launcher", "python"]

TOOLS = {  # Configuration, file on the page, settings that select it, and commands without and with lowmem.
    "axolotl": (axolotl, "fused_axolotl.py", {"trainer_cls": "fused_axolotl.FusedAxolotlTrainer"}, AXOLOTL, AXOLOTL),
    "llamafactory": (
        llamafactory, "fused_factory.py", {}, ["-m", "llamafactory.cli", "train"], ["fused_factory.py", "train"],
    ),
}  # fmt: skip


def run(folder, command, config, **settings):
    """Runs a command with a configuration and returns the weights in its output folder."""
    output = Path(settings["output_dir"])
    path = folder / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump({**config, **settings}))
    telemetry = {"DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **telemetry, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, *command, str(path)]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return load_file(output / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_weights_are_those_without_lowmem_and_a_run_resumes(tool, tmp_path):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: it needs a separate environment")
    configure, name, choice, plain_command, command = TOOLS[tool]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    make_model(tmp_path / "model", train_tokenizer([PAGE], 400), num_key_value_heads=2, **sizes)
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"from {tool}" in code)
    (tmp_path / name).write_text(code)
    config = configure(tmp_path)
    plain = run(tmp_path, plain_command, config, output_dir=str(tmp_path / "plain"))
    fused = run(tmp_path, command, config, **choice, output_dir=str(tmp_path / "fused"))
    assert (tmp_path / "fused" / "checkpoint-4" / "optimizer.safetensors").exists()  # from a lowmem checkpoint
    first = tmp_path / "resumed" / "checkpoint-2"
    shutil.copytree(tmp_path / "fused" / "checkpoint-2", first)
    resumed = run(tmp_path, command, config, **choice, output_dir=str(first.parent), resume_from_checkpoint=str(first))
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert plain.keys() == fused.keys() == resumed.keys() == start.keys()
    for key, weight in plain.items():
        assert torch.equal(weight, fused[key]) and torch.equal(weight, resumed[key]), key
        assert not torch.equal(weight, start[key]), key
