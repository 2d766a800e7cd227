"""What a run's result depends on besides its configuration: pairs of runs, and by how much their weights differ.

    python -m benchmarks.determinism [--steps 20] [--only "2 data loader workers"]

Every run is the quickstart with a smaller model and fewer steps, by `lowmem sft` in a process of its own, on the CPU.
Its weights and its last loss are compared with those of another run, which differs in one thing. The attention of the
first group has dropout, so that a run that draws another random number is seen.
"""

import argparse
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from benchmarks import reports
from benchmarks.baselines import select
from benchmarks.processes import MeasurementError, execute
from benchmarks.reports import command, formatted, headline, print_missing, print_table
from scripts.make_docstrings import collect
from scripts.make_model import make_model, train_tokenizer

# Of every run that does not say otherwise. Torch and DeepSpeed read it when they are imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

ROOT = Path(__file__).parent.parent
# Arguments in place of those of the quickstart; {folder} has the data and the models.
SMALLER = (
    "--model_name_or_path={folder}/model", "--max_length=64", "--warmup_steps=5", "--logging_steps=1",
    "--eval_strategy=no", "--save_total_limit=10",
)  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}  # fmt: skip
RECORDS = 203  # 11 are held out, and 192 are 12 full batches
DROPOUT = ("--model_name_or_path={folder}/dropout",)
EVALUATED = ("--eval_strategy=steps", "--eval_steps=5")
HALVES = ("--per_device_train_batch_size=8",)  # the quickstart has 16
NOT_FULL = ("--config={folder}/fewer.yaml",)
ROUNDED = ("--dtype=bfloat16", "--fused.rounding=stochastic")
ZERO3 = f"--deepspeed={ROOT / 'configs' / 'zero3.json'}"


@dataclass(frozen=True)
class Run:
    """A run, and the one it is compared with, by its name; None for one that others are compared with."""

    against: str | None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0  # of a process group, if there is one
    elsewhere: bool = False  # started in another directory
    resumes: bool = False  # from a third and from two thirds of the steps


FIRST, UNDROPPED, STOCHASTIC, CLIPPED = "a run", "without dropout", "bfloat16, stochastic rounding", "clipped, deferred"
PARTIAL = "a last batch that is not full"
COMPILED, REPLICATED, FSDP2, SHARDED = "compiled", "2 ranks, replicated", "2 ranks, FSDP2", "2 ranks, ZeRO-3"
RUNS = {
    FIRST: Run(None, DROPOUT),
    "another process and hash seed": Run(FIRST, DROPOUT, {"PYTHONHASHSEED": "1"}),
    "another directory": Run(FIRST, DROPOUT, elsewhere=True),
    "1 data loader worker": Run(FIRST, (*DROPOUT, "--dataloader_num_workers=1")),
    "2 data loader workers": Run(FIRST, (*DROPOUT, "--dataloader_num_workers=2")),
    "2 processes that tokenize": Run(FIRST, (*DROPOUT, "--dataset_num_proc=2")),
    "norms logged": Run(FIRST, (*DROPOUT, "--fused.log_norms=true")),
    "evaluated, with dropout": Run(FIRST, (*DROPOUT, *EVALUATED)),
    "resumed twice": Run(FIRST, DROPOUT, resumes=True),
    "activation checkpointing": Run(FIRST, (*DROPOUT, "--activation_checkpointing=true")),
    "policy two_pass": Run(FIRST, (*DROPOUT, "--fused.policy=two_pass")),
    "policy deferred": Run(FIRST, (*DROPOUT, "--fused.policy=deferred")),
    CLIPPED: Run(None, (*DROPOUT, "--max_grad_norm=0.5", "--fused.policy=deferred")),
    "clipped, two_pass": Run(CLIPPED, (*DROPOUT, "--max_grad_norm=0.5", "--fused.policy=two_pass")),
    "2 threads": Run(FIRST, DROPOUT, {"OMP_NUM_THREADS": "2"}),
    COMPILED: Run(FIRST, (*DROPOUT, "--fused.compile=true")),
    "compiled, another process": Run(COMPILED, (*DROPOUT, "--fused.compile=true")),
    UNDROPPED: Run(None),
    "evaluated": Run(UNDROPPED, EVALUATED),
    "2 micro-batches": Run(UNDROPPED, (*HALVES, "--gradient_accumulation_steps=2")),
    "1 rank": Run(UNDROPPED, ranks=1),
    REPLICATED: Run(UNDROPPED, HALVES, ranks=2),
    FSDP2: Run(UNDROPPED, (*HALVES, "--fsdp"), ranks=2),
    SHARDED: Run(UNDROPPED, (*HALVES, ZERO3), ranks=2),
    "2 ranks, replicated, again": Run(REPLICATED, HALVES, ranks=2),
    "2 ranks, FSDP2, again": Run(FSDP2, (*HALVES, "--fsdp"), ranks=2),
    "2 ranks, ZeRO-3, again": Run(SHARDED, (*HALVES, ZERO3), ranks=2),
    PARTIAL: Run(None, NOT_FULL),
    "2 ranks, a last batch that is not full": Run(PARTIAL, (*HALVES, *NOT_FULL), ranks=2),
    STOCHASTIC: Run(None, ROUNDED),
    "bfloat16, stochastic, another process": Run(STOCHASTIC, ROUNDED),
    "bfloat16, stochastic, resumed twice": Run(STOCHASTIC, ROUNDED, resumes=True),
    "bfloat16, stochastic, 2 ranks": Run(STOCHASTIC, (*ROUNDED, *HALVES), ranks=2),
    "another seed": Run(FIRST, (*DROPOUT, "--seed=1")),
}


def write_inputs(folder: Path) -> None:
    """Signatures and docstrings of the standard library, one text per line; models; and two configurations."""
    pairs, _ = collect(Path(sysconfig.get_path("stdlib")))
    chosen = islice(pairs, 0, None, len(pairs) // RECORDS)
    texts = [f"{pair['instruction']}\n{pair['output']}" for pair in islice(chosen, RECORDS)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(texts, 512)
    make_model(folder / "model", tokenizer, **SIZES)
    make_model(folder / "dropout", tokenizer, **SIZES, attention_dropout=0.1)
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    data = {"path": "json", "data_files": str(folder / "data.jsonl")}
    for name, rows in (("config", RECORDS), ("fewer", RECORDS - 2)):
        config["datasets"] = [{**data, "split": f"train[:{rows}]"}]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


def train(run: Run, steps: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """The weights after a run, and its loss at every step.

    Raises:
        MeasurementError: the command failed.
    """
    where = Path(tempfile.mkdtemp(dir=folder))
    saves = -(-steps // 3) if run.resumes else steps
    sizes = (f"--max_steps={steps}", f"--save_steps={saves}", f"--output_dir={where / 'run'}")
    words = ("--config={folder}/config.yaml", *SMALLER, *run.arguments, *sizes)
    arguments = ["lowmem", "sft", *(word.format(folder=folder) for word in words)]
    _start(arguments, run, where)
    for resumed in (saves, 2 * saves) if run.resumes else ():
        for checkpoint in (where / "run").glob("checkpoint-*"):
            if int(checkpoint.name.rpartition("-")[2]) > resumed:
                shutil.rmtree(checkpoint)
        _start([*arguments, "--resume_from_checkpoint=last"], run, where)
    lines = map(json.loads, (where / "run" / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return load_file(where / "run" / f"checkpoint-{steps}" / "model.safetensors"), losses


def _start(arguments: Sequence[str], run: Run, where: Path) -> None:
    if not run.environment:
        execute(arguments, where / "log", run.ranks, folder=where if run.elsewhere else ROOT)
        return
    # some variables of the environment are read when Python or torch starts
    environment = {**os.environ, **run.environment}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(done.stderr.strip().splitlines()[-1])


def difference(weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two weights relative to the largest of their tensor; 0 if all bits are equal."""
    assert weights.keys() == others.keys()
    largest = 0.0
    for name, other in others.items():
        weight = weights[name]
        if weight.dtype != other.dtype or not torch.equal(weight, other):
            apart = (weight.double() - other.double()).abs().max() / other.double().abs().max()
            largest = max(largest, apart.item()) if apart.isfinite() else math.inf
    return largest


def compare(names: Sequence[str], options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Does the runs and those they are compared with; the differences by name, and the errors of those that failed."""
    differences: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="lowmem-bench-") as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        finished = functools.cache(lambda name: train(RUNS[name], options.steps, folder))
        console = Console(stderr=True)
        for number, name in enumerate(names, 1):
            against = RUNS[name].against
            if against is None:
                continue
            try:
                (weights, losses), (others, their_losses) = finished(name), finished(against)
            except MeasurementError as error:
                failed[name] = str(error)
                continue
            loss = abs(losses[options.steps] - their_losses[options.steps]) / their_losses[options.steps]
            apart = difference(weights, others)
            differences[name] = {"against": against, "identical": apart == 0, "weights": apart, "loss": loss}
            console.print(f"{number} of {len(names)}: {name}, {apart:.1e}", highlight=False)
    return differences, failed


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {"steps": (20, "steps of a run, at least 3")}
    options = reports.make_parser(__doc__, counts, dtype=False, only="run").parse_args(argv)
    names = list(select(RUNS, options.only))
    os.environ.update(ENVIRONMENT)
    with reports.output(options.out, "determinism"):
        differences, failed = compare(names, options)
        print(f"{headline('float32')}\n")
        rows = [
            (name, row["against"], "yes" if row["identical"] else "no", *map(_shown, (row["weights"], row["loss"])))
            for name, row in differences.items()
        ]
        print_table(("run", "compared with", "bit-identical", "weights differ by", "loss differs by"), rows)
        print_missing(failed, {})
        settings = {"steps": options.steps, "records": RECORDS, "arguments": SMALLER}
        reports.save(options.out / "determinism.json", settings, differences=differences, failed=failed)


def _shown(value: float) -> str:
    return formatted(value, ".1e") if value else "0"


if __name__ == "__main__":
    main()
