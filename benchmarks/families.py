"""Tests lowmem with a tiny model of each family of language models.

    python -m benchmarks.families [--only gemma2] [--out benchmarks/results]

`lowmem sft` trains each model for four steps from random float32 weights, with default options. The losses are compared
with TRL's trainer and the same arguments. Training is repeated with packed samples, and resumed from a checkpoint after
two steps. The planned peak is compared with the tensors of a step.

With `--only`, only the rows of these families are replaced in the JSON file.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, set_seed
from trl import SFTTrainer

from benchmarks import pages, reports
from benchmarks.reports import command
from lowmem import cli
from lowmem.run import data
from lowmem.run.fake import running
from lowmem.run.plan import plan
from lowmem.run.recipe import parse
from scripts.make_model import train_tokenizer

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
LINEAR = {f"linear_{name}": size for name, size in (
    ("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 16), ("value_head_dim", 16),
)}  # fmt: skip
# Model type → configuration values in addition to `SIZES`
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in (
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "granite",
        "cohere2", "smollm3", "starcoder2", "glm4", "exaone4", "nemotron", "gpt2", "gpt_neox", "bloom", "falcon",
    )},
    "lfm2": {},
    "phi": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe"), EXPERTS),
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 128},
    "glm4_moe": ROUTED,
    "deepseek_v3": {**ROUTED, **LATENT},
    "longcat_flash": {**LATENT, "num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
                      "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32},
    "qwen3_5_text": {**LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
}  # fmt: skip
ARGUMENTS = {"llama4_text": ["--router_aux_loss_coef=0"]}  # required for training
STEPS = 4  # per run
TOLERANCE = 1e-4  # of losses, because TRL sums in a different order
TEXTS = [f"the {size} {animal} sat on {n}" for size in ("old", "new") for animal in ("cat", "dog") for n in range(4)]
USUAL = ["--max_length=64", "--per_device_train_batch_size=2", "--learning_rate=1e-3", "--report_to=none"]
RUN = [f"--max_steps={STEPS}", f"--save_steps={STEPS // 2}", "--logging_steps=1", "--lr_scheduler_type=constant"]


def config(kind: str, **changes: Any) -> Any:
    """Returns the configuration of a family's model. Keys of `SIZES` are replaced by the names of its class."""
    cls = CONFIG_MAPPING[kind]
    names = {field.name: field.name for field in fields(cls)} | cls.attribute_map
    sizes = {names[name]: size for name, size in SIZES.items() if name in names}
    tokens = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
    return AutoConfig.for_model(kind, **{**sizes, **tokens, **FAMILIES[kind], **changes})


def examine(kind: str, folder: Path) -> dict[str, str]:
    """Trains, packs, resumes, generates and plans, and returns each outcome by column."""
    set_seed(0)
    AutoModelForCausalLM.from_config(config(kind)).save_pretrained(folder / "model")
    train_tokenizer(TEXTS, SIZES["vocab_size"]).save_pretrained(folder / "model")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    model = f"--model_name_or_path={folder}/model"
    arguments = [model, f"--datasets=[{{path: json, data_files: {folder}/texts.jsonl}}]", *USUAL]
    arguments += ARGUMENTS.get(kind, [])
    checks: dict[str, Callable[[], str]] = {
        "trains": lambda: compared([*arguments, *RUN], folder / "run"),
        "packs": lambda: ended("sft", *arguments, f"--output_dir={folder}/packed", "--packing=true", "--max_steps=1"),
        "resumes": lambda: resumed([*arguments, *RUN], folder / "run"),
        "generates": lambda: ended("generate", f"{folder}/run", "the old", "--max-new-tokens=4"),
        "plan": lambda: planned(arguments),
    }
    outcomes = {}
    for name, check in checks.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                outcomes[name] = check()
        except Exception as error:  # from any library
            outcomes[name] = f"failed: {type(error).__name__}: {error}"
    return outcomes


def ended(*arguments: str) -> str:
    """Runs a command and returns "yes" or its error message. With exit status 2, it rejected its arguments."""
    err = io.StringIO()
    status = 0
    with contextlib.redirect_stderr(err):
        try:
            cli.main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    message = err.getvalue().strip().rpartition("\n")[2].removeprefix("error: ")
    return {0: "yes", 2: f"refused: {message}"}.get(status, f"failed: {message}")


def compared(arguments: list[str], run: Path) -> str:
    """Trains a model, and compares the losses with the losses of TRL's trainer."""
    if (result := ended("sft", *arguments, f"--output_dir={run}")) != "yes":
        return result
    losses = [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
    recipe = parse("sft", [*arguments, f"--output_dir={run}-trl", "--save_strategy=no"], device="cpu")
    trainer = SFTTrainer(recipe.model.model_name_or_path, args=recipe.training, train_dataset=data.load(recipe)[0])
    try:
        trainer.train()
    except Exception as error:
        return f"TRL fails: {error}"
    trl_losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    difference = max(abs(ours / loss - 1) for ours, loss in zip(filter(None, losses), trl_losses, strict=True))
    return "as TRL" if difference <= TOLERANCE else f"losses differ by {difference:.0e}"


def resumed(arguments: list[str], run: Path) -> str:
    """Resumes the run from its first checkpoint, and compares the weights bit for bit."""
    again = [f"--output_dir={run}-again", f"--resume_from_checkpoint={run}/checkpoint-{STEPS // 2}"]
    if (result := ended("sft", *arguments, *again)) != "yes":
        return result
    weights, end = (load_file(f"{folder}/model.safetensors") for folder in (run, f"{run}-again"))
    return "yes" if all(torch.equal(end[name], weight) for name, weight in weights.items()) else "other weights"


def planned(arguments: list[str]) -> str:
    """Returns the relative difference between the planned and the measured peak of a step."""
    arguments = [*arguments, "--bf16=false", "--max_grad_norm=0", "--fused.compile=false", "--output_dir=unused"]
    real, fake = (parse("sft", arguments, device=device) for device in (None, "cpu"))
    with running(real, torch.device("cpu"), real=True) as measured:
        peak = measured.step().peak
    difference = plan(fake).step.peak / peak - 1
    return "0" if abs(difference) < 5e-4 else f"{difference:+.1%}"


def tables(report: Any) -> dict[str, str]:
    """Returns a table of outcomes without error messages. Families with equal outcomes share a row."""
    outcomes = {
        kind: {name: text.partition(":")[0] for name, text in row.items()} for kind, row in report["families"].items()
    }
    return {"": pages.grouped("model type", outcomes)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = reports.make_parser(__doc__, {}, dtype=False, only="families").parse_args(argv)
    file = options.out / "families.json"
    with reports.output(options.out):
        rows = json.loads(file.read_text())["families"] if options.only and file.exists() else {}
        for kind in options.only or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                rows[kind] = examine(kind, Path(folder))
            print(kind, *rows[kind].values(), sep=" | ", flush=True)
        reports.publish(options.out, "families", {"steps": STEPS}, tables, families=rows)


if __name__ == "__main__":
    main()
