"""Compares the planned with the measured peak of all tensors in a step on CPU ranks, by model, placement and rule.

    python -m benchmarks.plans [--only "..."] [--out benchmarks/results]

For each placement, a group of processes trains every model with every rule for one step (two under ZeRO-3). The peak
of rank 0 is compared with `lowmem plan --device cpu --ranks N` with the same arguments.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import reports
from benchmarks.pages import ROOT, grouped
from benchmarks.reports import command
from lowmem.run.fake import running
from lowmem.run.plan import plan
from lowmem.run.recipe import Recipe, parse

SMALL = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "vocab_size": 8192}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DENSE = {**SMALL, **HEADS}
ADAPTERS = ("--use_peft", "--lora_target_modules", "all-linear")
# Name → model type, changed configuration values, command, and additional arguments
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "Llama": ("llama", {**DENSE, "tie_word_embeddings": False}, "sft", ()),
    "Llama, tied": ("llama", {**DENSE, "tie_word_embeddings": True}, "sft", ()),
    "Qwen3, tied": ("qwen3", {**DENSE, "tie_word_embeddings": True}, "sft", ()),
    "Mistral": ("mistral", DENSE, "sft", ()),
    "Gemma 2": ("gemma2", DENSE, "sft", ()),
    "GPT-2": ("gpt2", {"n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 8192, "n_positions": 512}, "sft", ()),
    "Qwen3, experts": ("qwen3_moe", {**DENSE, **MIXED}, "sft", ()),
    "Llama, LoRA": ("llama", DENSE, "sft", ADAPTERS),
    "Llama, int12": ("llama", DENSE, "sft", ("--fused.weight_format", "int12")),
    "Llama, DPO": ("llama", DENSE, "dpo", ()),
    "Llama, KTO": ("llama", DENSE, "kto", ()),
    "Llama, reward": ("llama", DENSE, "reward", ()),
}
# Name → number of ranks, and additional arguments
PLACEMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "replicated, 2": (2, ()),
    "FSDP2, 2": (2, ("--fsdp",)),
    "FSDP2, 3": (3, ("--fsdp",)),
    "ZeRO-3, 2": (2, ("--deepspeed", "configs/zero3.json")),
    "ZeRO-3, 3": (3, ("--deepspeed", "configs/zero3.json")),
    "ZeRO-3, offloaded, 2": (2, ("--deepspeed", "configs/zero3_offload.json")),
}
RULES = {
    f"{rule}, {storage}": ("--fused.rule", rule, "--learning_rate", "1e-3", "--fused.state_storage", storage)
    for rule, storage in (("adalomo", "float32"), ("adamw", "float32"), ("adamw", "bfloat16"), ("lion", "bfloat16"))
}
USUAL = (
    "--dtype", "bfloat16", "--bf16", "false", "--max_length", "128", "--per_device_train_batch_size", "2",
    "--max_grad_norm", "0", "--report_to", "none", "--fused.compile", "false", "--output_dir", "unused",
)  # fmt: skip
# Combinations of model and placement that lowmem does not support
UNSUPPORTED = {("Llama, int12", "ZeRO-3")}


def recipes(
    placement: str, models: Sequence[str], rules: Sequence[str], folder: Path, *, device: str | None
) -> Iterator[tuple[str, str, Recipe]]:
    """Yields all combinations of models and rules for a placement, each with its recipe."""
    for model in models:
        if (model, placement.partition(",")[0]) in UNSUPPORTED:
            continue
        kind, values, method, arguments = MODELS[model]
        path = folder / model.replace(" ", "_")
        AutoConfig.for_model(kind, **values).save_pretrained(path)
        for rule in rules:
            sharding = PLACEMENTS[placement][1]
            argv = ["--model_name_or_path", str(path), *USUAL, *arguments, *RULES[rule], *sharding]
            if "int12" in model and sharding:
                argv += ["--fsdp_config", '{"cpu_ram_efficient_loading": false}']
            yield model, rule, parse(method, argv, device=device)


def measure(placement: str, models: Sequence[str], rules: Sequence[str], folder: Path) -> dict[str, dict[str, int]]:
    """Returns the measured peaks of this rank in bytes, by model and rule."""
    peaks: dict[str, dict[str, int]] = {}
    for model, rule, recipe in recipes(placement, models, rules, folder, device=None):
        with running(recipe, torch.device("cpu"), real=True) as run:
            peaks.setdefault(model, {})[rule] = run.step().peak
    return peaks


def compare(
    placement: str, models: Sequence[str] = tuple(MODELS), rules: Sequence[str] = tuple(RULES)
) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the measured and planned peaks of a placement in bytes, by model and rule."""
    ranks = PLACEMENTS[placement][0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peaks.json"
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"] if ranks > 1 else []
        chosen = json.dumps([models, rules])
        argv = [sys.executable, *launcher, "-m", "benchmarks.plans", "--rank", placement, str(file), chosen]
        subprocess.run(argv, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        peaks = json.loads(file.read_text())
        for model, rule, recipe in recipes(placement, models, rules, Path(folder), device="cpu"):
            peaks[model][rule] = {"measured": peaks[model][rule], "planned": plan(recipe, ranks).step.peak}
        return peaks  # type: ignore[no-any-return]


def tables(report: Any) -> dict[str, str]:
    """Returns a table of the largest difference over all rules for each model and placement."""

    def worst(model: str, placement: str) -> str:
        pairs = report["peaks"].get(placement, {}).get(model, {}).values()
        differences = [pair["planned"] / pair["measured"] - 1 for pair in pairs]
        largest = max(differences, key=abs, default=None)
        if largest is None:
            return "–"
        return "0" if abs(largest) < 5e-4 else f"{largest:+.1%}"

    return {"": grouped("model", {model: {name: worst(model, name) for name in PLACEMENTS} for model in MODELS})}


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {}, dtype=False, only="placements")
    options = parser.parse_args(argv)
    names = [name for name in PLACEMENTS if not options.only or name in options.only]
    with reports.output(options.out):
        peaks = {}
        for name in names:
            print(name, flush=True)
            peaks[name] = compare(name)
        reports.publish(options.out, "plans", {"models": list(MODELS), "rules": list(RULES)}, tables, peaks=peaks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        with tempfile.TemporaryDirectory() as path:
            measured = measure(sys.argv[2], *json.loads(sys.argv[4]), Path(path))
        if int(os.environ.get("RANK", 0)) == 0:
            Path(sys.argv[3]).write_text(json.dumps(measured))
    else:
        main()
