"""Rehearsals: real runs of the command line at a size where updates are compiled, each against the same run by tiles.

    python -m benchmarks.rehearsal [--steps 60] [--only "..."] [--all] [--out benchmarks/results]

A rehearsal is a model of 40M parameters and more on chats of many lengths, with activation checkpointing. It is trained
three times: with compiled updates; resumed from the middle of that run, which has to end in the same bits; and with
`compile: false`, where losses and weights may differ by rounding. The settings are drawn such that every pair of values
of two of `AXES` occurs; `--all` takes all of them. A combination that is refused by design has to end before its first
step with one message. `USUAL` are the settings that people begin with.

`--only` replaces these rows of the JSON file.

Compiled code is in one cache, so that only the first run of a kind compiles. Ranks share the threads of one process. A
processor without bfloat16 instructions takes a hundred times as long for bfloat16 and int12.
"""

import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from benchmarks import reports
from benchmarks.measurement import peak_of_tensors
from benchmarks.methods import select
from benchmarks.pages import ROOT, markdown
from benchmarks.processes import MeasurementError, alone, execute
from benchmarks.reports import command, formatted
from lowmem.run import build, data
from lowmem.run.plan import plan
from lowmem.run.recipe import parse
from scripts.make_docstrings import collect
from scripts.make_model import make_model, train_tokenizer

SECONDS = 1800  # until a run counts as hanging
LONGEST_PAIR = 512  # tokens of a pair for DPO, which leaves out longer ones

# Words of the command line by axis and value. The first two groups of models have 41M and 46M parameters.
AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "method": {"SFT": ("sft",), "DPO": ("dpo", f"--max_length={LONGEST_PAIR}", "--per_device_train_batch_size=1")},
    "head": {"untied": ("--model_name_or_path={folder}/untied",), "tied": ("--model_name_or_path={folder}/tied",)},
    "weights": {
        "float32": ("--dtype=float32",),
        "bfloat16": ("--dtype=bfloat16",),
        "int12": ("--dtype=bfloat16", "--fused.weight_format=int12"),
    },
    "gradients": {
        "neither": ("--max_grad_norm=0",),
        "clipped": ("--max_grad_norm=0.5",),
        "accumulated": ("--max_grad_norm=0", "--gradient_accumulation_steps=2", "--per_device_train_batch_size=1"),
    },
    "optimizer": {
        "AdaLomo": ("--fused.rule=adalomo", "--learning_rate=1e-2"),
        "AdamW, 8-bit states": ("--fused.rule=adamw", "--fused.state_storage=8bit", "--learning_rate=1e-3"),
        "torch's NAdam": ("--fused.rule=torch.optim.NAdam", "--learning_rate=1e-3"),
    },
    "placement": {
        "one process": (),
        "replicated": (),
        "FSDP2": ("--fsdp", "--fused.compile=true"),  # a shard is smaller than what "auto" compiles
        "ZeRO-3": (f"--deepspeed={ROOT / 'configs' / 'zero3.json'}", "--fused.compile=true"),
    },
}
# Pairs of values that a run refuses before its first step.
REFUSED = ({"int12", "ZeRO-3"}, {"int12", "torch's NAdam"})

# What people begin with: the first has no words at all. The model has 64M parameters, the chats have 8 to 430 tokens.
_USUAL = ("sft", "--model_name_or_path={folder}/usual", "--max_length=430")
_ADALOMO = ("--fused.rule=adalomo", "--learning_rate=1e-2")
USUAL: dict[str, tuple[str, ...]] = {
    "float32 without `fused`": (),
    "float32, AdaLomo": _ADALOMO,
    "bfloat16, AdaLomo": (*_ADALOMO, "--dtype=bfloat16"),
    "bfloat16, AdaLomo, not clipped": (*_ADALOMO, "--dtype=bfloat16", "--max_grad_norm=0"),
    "bfloat16, AdamW with 8-bit states, accumulated": (
        "--dtype=bfloat16", "--fused.rule=adamw", "--fused.state_storage=8bit", "--learning_rate=1e-4",
        "--gradient_accumulation_steps=2",
    ),
    "int12, AdaLomo": (*_ADALOMO, "--dtype=bfloat16", "--fused.weight_format=int12"),
    "float32, torch's NAdam": ("--fused.rule=torch.optim.NAdam", "--learning_rate=1e-4"),
}  # fmt: skip

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
MODELS = {
    "untied": {"vocab_size": 49_152, "hidden_size": 384, "intermediate_size": 1024, "tie_word_embeddings": False},
    "tied": {"vocab_size": 50_257, "hidden_size": 768, "intermediate_size": 1536, "tie_word_embeddings": True},
    "usual": {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "tie_word_embeddings": False},
}
# Up to these a difference from the run by tiles is rounding, which training amplifies.
LOSSES_APART = {"float32": 1e-3, "bfloat16": 2e-2}
WEIGHTS_APART = {"float32": 1e-2, "bfloat16": 0.3}
CHATS = 64
SHORTEST, MEDIAN, LONGEST, SPREAD = 8, 64, 2048, 1.1  # tokens of a chat, and the deviation of their logarithm


Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Rehearsal:
    """A run by its words, or by one value of each axis."""

    words: tuple[str, ...]
    values: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Of its process group, if it has one."""
        return 2 if self.values and "one process" not in self.values else 0

    @property
    def refused(self) -> bool:
        """True if the run has to raise before its first step."""
        return any(pair <= set(self.values) for pair in REFUSED)

    @property
    def compiled(self) -> bool:
        """True if its updates are compiled, unlike updates by torch's classes."""
        return not any("torch.optim" in word for word in self.words)


@dataclass
class Outcome:
    """A rehearsal's figures.

    outcome: passed, refused or failed.  message: of the one that is refused or has failed.  steps: of each of its runs.
    losses: largest difference to the run by tiles, relative.  weights: largest difference of a tensor, relative to how
    far the run has moved it.  peak, planned: bytes of a step of the longest chats.
    """

    outcome: str
    message: str = ""
    steps: int = 0
    losses: float | None = None
    weights: float | None = None
    peak: int | None = None
    planned: int | None = None
    seconds: float = 0.0

    def row(self) -> dict[str, str]:
        """Its columns in a table."""
        apart = ["0" if value == 0 else formatted(value, ".0e") for value in (self.losses, self.weights)]
        sizes = [formatted(size and size / 2**20, ",.0f") for size in (self.peak, self.planned)]
        failed = f"failed: {self.message}" if self.outcome == "failed" else self.outcome
        cells = (failed, str(self.steps), *apart, *sizes, f"{self.seconds:.0f}")
        columns = ("outcome", "steps", "losses differ by", "weights differ by", "peak, MiB", "planned", "seconds")
        return dict(zip(columns, cells, strict=True))


# -- which runs --------------------------------------------------------------------------------------------------------


def combinations(every: bool = False) -> dict[str, Rehearsal]:
    """Rehearsals by name such that every pair of values of two axes occurs in one, or all of them."""
    product = []
    for values in itertools.product(*AXES.values()):
        words = (axis[value] for axis, value in zip(AXES.values(), values, strict=True))
        product.append(Rehearsal(tuple(itertools.chain.from_iterable(words)), values))
    chosen = product
    if not every:
        chosen = [next(one for one in product if pair <= set(one.values)) for pair in REFUSED]
        allowed = [one for one in product if not one.refused]
        missing, used = set().union(*map(_pairs, allowed)), Counter[str]()
        while missing:
            gain = {one: (len(missing & _pairs(one)), -sum(used[value] for value in one.values)) for one in allowed}
            chosen.append(best := max(allowed, key=lambda one: gain[one]))
            missing -= _pairs(best)
            used.update(best.values)
    return {", ".join(one.values): one for one in chosen}


def _pairs(one: Rehearsal) -> set[tuple[str, ...]]:
    return set(itertools.combinations(one.values, 2))


# -- inputs ------------------------------------------------------------------------------------------------------------


def corpus() -> tuple[list[str], Any]:
    """Texts from the standard library, and a tokenizer for them."""
    texts = [f"{pair['instruction']}\n{pair['output']}\n" for pair in collect(Path(sysconfig.get_path("stdlib")))[0]]
    return texts, train_tokenizer(texts[:2000], 4096)


def write_inputs(folder: Path, steps: int, models: Sequence[str] = tuple(MODELS), longest: int = LONGEST) -> None:
    """Writes models with random weights, chats from the standard library, and the arguments that all runs share.

    Args:
        steps: of a run.
        models: names of those to write.
        longest: tokens of the longest chat.
    """
    texts, tokenizer = corpus()
    for name in models:
        make_model(folder / name, tokenizer, **LAYERS, **MODELS[name])
    tokens = tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    long = {"sft": [longest + 64, longest - 8] * 2, "dpo": [min(longest, LONGEST_PAIR) - 24] * 4}
    for name, method in itertools.product(("chats", "longest"), long):
        lengths = long[method] if name == "longest" else chat_lengths(longest)
        data = folder / f"{name}.{method}.jsonl"
        lines = (chat(method, length, tokenizer, tokens[97 * n :]) for n, length in enumerate(lengths))
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = {
            "datasets": [{"path": "json", "data_files": str(data)}], "max_length": longest, "max_steps": steps,
            "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": steps // 2, "report_to": "none",
            "gradient_checkpointing": True, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2,
        }  # fmt: skip
        (folder / f"{name}.{method}.yaml").write_text(yaml.safe_dump(config))


def chat_lengths(longest: int) -> list[int]:
    """The lengths of the chats in tokens: the quantiles of a log-normal distribution, in a random order."""
    normal = statistics.NormalDist(math.log(MEDIAN), SPREAD)
    lengths = [round(math.exp(normal.inv_cdf((n + 0.5) / CHATS))) for n in range(CHATS)]
    lengths = [SHORTEST, *(min(max(SHORTEST, length), longest) for length in lengths[1:-1]), longest]
    random.Random(0).shuffle(lengths)
    return lengths


def chat(method: str, length: int, tokenizer: Any, tokens: Sequence[int]) -> dict[str, list[dict[str, str]]]:
    """A chat of about `length` of these tokens, with four of the template; for DPO with another, shorter answer."""

    def message(role: str, start: int, end: int) -> list[dict[str, str]]:
        return [{"role": role, "content": tokenizer.decode(tokens[start:end])}]

    half, end = length // 2, length - 2
    question, answer = message("user", 2, half), message("assistant", half, end)
    if method == "sft":
        return {"messages": question + answer}
    return {"prompt": question, "chosen": answer, "rejected": message("assistant", end, end + max(1, half // 2))}


# -- one rehearsal -----------------------------------------------------------------------------------------------------


def rehearse(rehearsal: Rehearsal, steps: int, folder: Path, peak: bool = True) -> Outcome:
    """Trains compiled, resumed and by tiles, and compares them; `folder` has the inputs and a cache of code.

    Args:
        peak: also measures the memory of a step and compares it with the plan, on one process.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as where:
        try:
            outcome = _rehearse(rehearsal, steps, folder, Path(where), peak)
        except MeasurementError as error:
            # of the rank that was the first to end
            message = re.fullmatch(r"(?s)error(?: on rank \d+)?: (.*)", str(error))
            expected = rehearsal.refused and message is not None and "unexpected" not in message[1]
            refused = expected and not Path(where, "run", "metrics.jsonl").exists()
            outcome = Outcome("refused" if refused else "failed", message[1] if message else str(error))
    outcome.steps, outcome.seconds = steps, time.monotonic() - begin
    return outcome


def _rehearse(rehearsal: Rehearsal, steps: int, folder: Path, where: Path, peak: bool) -> Outcome:
    method, *words = (word.format(folder=folder) for word in rehearsal.words)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    threads = max(1, torch.get_num_threads() // max(1, rehearsal.ranks))

    def run(name: str, *more: str) -> tuple[dict[str, torch.Tensor], list[float]]:
        start = ["lowmem", method, f"--config={folder}/chats.{method}.yaml", *words, f"--output_dir={where / name}"]
        log = where / f"{name}.log"
        execute([*start, *more], log, rehearsal.ranks, environment=environment, threads=threads, seconds=SECONDS)
        if rehearsal.compiled and not more and "compiled the optimizer in" not in log.read_text():
            raise MeasurementError("nothing was compiled")
        lines = map(json.loads, (where / name / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        return load_file(where / name / "model.safetensors"), losses

    weights, losses = run("run")
    if rehearsal.refused:
        raise MeasurementError("it should have raised")
    shutil.rmtree(where / "run" / f"checkpoint-{steps}")
    resumed, same_losses = run("run", "--resume_from_checkpoint=last")
    if same_losses != losses or any(not torch.equal(resumed[name], weight) for name, weight in weights.items()):
        raise MeasurementError(f"the run that was resumed after step {steps // 2} ends in other bits")
    by_tiles, their_losses = run("tiles", "--fused.compile=false")
    model = next(word.partition("=")[2] for word in words if word.startswith("--model_name_or_path"))
    loss = max(abs(one - other) / abs(other) for one, other in zip(losses, their_losses, strict=True))
    apart = difference(weights, by_tiles, load_file(Path(model) / "model.safetensors"))
    dtype = "bfloat16" if "--dtype=bfloat16" in words else "float32"
    outcome = Outcome("passed", losses=loss, weights=apart)
    if not (loss <= LOSSES_APART[dtype] and apart <= WEIGHTS_APART[dtype]):  # or NaN
        outcome.outcome, outcome.message = "failed", "it differs from the run by tiles"
    if peak and not rehearsal.ranks:
        once = ["--max_steps=1", "--save_strategy=no", f"--output_dir={where / 'longest'}"]
        long = [method, f"--config={folder}/longest.{method}.yaml", *words, *once]
        outcome.peak, outcome.planned = alone(memory, long, folder=folder / "cache")
    return outcome


def difference(ours: Weights, theirs: Weights, start: Weights) -> float:
    """The largest difference of two tensors by their norm, relative to how far theirs is from where it began."""

    def apart(name: str, from_: Weights) -> float:
        return (from_[name].double() - theirs[name].double()).norm().item()

    differences = {name: apart(name, ours) for name in theirs}
    return max(far / (apart(name, start) or math.ulp(0.0)) for name, far in differences.items())


def memory(words: Sequence[str]) -> tuple[int, int]:
    """The bytes of all tensors at the peak of a run's steps, and of its plan."""
    arguments = parse(words[0], words[1:], device="cpu")
    chats, _ = data.load(arguments)
    trainer = build.trainer(arguments, chats, None)
    return peak_of_tensors(trainer.train), plan(arguments).step.peak


# -- the command -------------------------------------------------------------------------------------------------------


def tables(report: Any) -> dict[str, str]:
    """A row for each rehearsal."""
    return {"": markdown([{"rehearsal": name, **Outcome(**run).row()} for name, run in report["runs"].items()])}


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {"steps": (60, "steps of a run, an even number")}, dtype=False, only="run")
    parser.add_argument("--all", action="store_true", help="every combination instead of every pair")
    options = parser.parse_args(argv)
    usual = {name: Rehearsal((*_USUAL, *words)) for name, words in USUAL.items()}
    chosen = select(usual | combinations(options.all), options.only)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    path, settings = options.out / "rehearsal.json", {"chats": CHATS}
    runs = json.loads(path.read_text())["runs"] if options.only and path.exists() else {}
    with reports.output(options.out), tempfile.TemporaryDirectory(prefix="lowmem-bench-") as folder:
        write_inputs(Path(folder), options.steps)
        for number, (name, rehearsal) in enumerate(chosen.items(), 1):
            outcome = rehearse(rehearsal, options.steps, Path(folder))
            runs[name] = asdict(outcome)
            reports.save(path, settings, runs=runs)
            line = f"{number} of {len(chosen)}: {name}: {', '.join(outcome.row().values())}"
            print(line, file=sys.stderr, flush=True)
        reports.publish(options.out, "rehearsal", settings, tables, runs=runs)


if __name__ == "__main__":
    main()
