"""The resident memory of each phase of a run: loading, steps, evaluation, saving, resuming and the end.

    python -m benchmarks.phases [--only "FSDP2, AdamW"] [--out benchmarks/results]

`lowmem sft` trains a Llama of 1.1 GB for two steps with a checkpoint after each, evaluates it, saves it, and is resumed
from the first. Its processes are sampled from outside; figures are of the rank with the most, above a process that has
imported everything. Memory that a process has allocated is told from pages of files that it has mapped, which the
system drops where memory is short. glibc is told to return what is freed. `--only` replaces these rows of the JSON.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks import reports
from benchmarks.measurement import llama
from benchmarks.pages import ROOT, markdown
from benchmarks.processes import Figures, MeasurementError, execute, repeated, resident
from benchmarks.rehearsal import corpus
from benchmarks.reports import command

MARKS = "LOWMEM_MARKS"  # the directory into which the processes of a run write when their phases begin
SIZES = (8, 1536, 4096, 16_000)  # layers, hidden size, size of MLPs, vocabulary: 276M parameters, in float32
STEPS, ROWS, TOKENS = 2, 4, 32
OTHERS = ("load", "evaluation", "save", "end", "resume")
PHASES = ("first step", "step", *OTHERS)
MAPPED = ", with mapped files"
RULES = {
    "AdaLomo": ("--fused.rule=adalomo", "--learning_rate=1e-3"),
    "AdamW": ("--fused.rule=adamw", "--learning_rate=1e-5"),
}
BROADCAST = '--fsdp_config={"cpu_ram_efficient_loading": true}'
# Ranks and words of the command line
PLACEMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (0, ()),
    "one device, to bfloat16": (0, ("--dtype=bfloat16",)),
    "one device, int12": (0, ("--fused.weight_format=int12",)),
    "one device, deferred": (0, ("--max_grad_norm=1", "--fused.policy=deferred", "--fused.store=host")),
    "replicated": (2, ()),
    "FSDP2": (2, ("--fsdp",)),
    "FSDP2, to bfloat16": (2, ("--fsdp", "--dtype=bfloat16")),
    "FSDP2, to bfloat16, broadcast": (2, ("--fsdp", "--dtype=bfloat16", BROADCAST)),
    "FSDP2, int12": (2, ("--fsdp", "--fused.weight_format=int12")),
    "ZeRO-3": (2, (f"--deepspeed={ROOT / 'configs' / 'zero3.json'}",)),
    "ZeRO-3, offload": (2, (f"--deepspeed={ROOT / 'configs' / 'zero3_offload.json'}",)),
}
CASES = {f"{place}, {rule}": (*PLACEMENTS[place], RULES[rule]) for place in PLACEMENTS for rule in RULES}


def marked(folder: Path) -> None:
    """Runs the command line in a process that writes when its phases begin."""
    from transformers import Trainer

    from lowmem import cli
    from lowmem.run import build
    from lowmem.run.folder import RunFolder
    from lowmem.trainer import FusedTrainerMixin

    file = (folder / str(os.getpid())).open("w", buffering=1)
    time.sleep(0.5)  # idle

    def mark(owner: Any, name: str, *phases: str, after: str = "step") -> None:
        function, calls = getattr(owner, name), iter(phases)

        def run(*args: Any, **options: Any) -> Any:
            print(time.monotonic(), next(calls, phases[-1]), file=file)
            result = function(*args, **options)
            print(time.monotonic(), after, file=file)
            return result

        setattr(owner, name, run)

    mark(build, "trainer", "load", after="load")
    mark(FusedTrainerMixin, "training_step", "first step", "step")
    mark(FusedTrainerMixin, "_save_checkpoint", "save")
    mark(FusedTrainerMixin, "_load_from_checkpoint", "resume", after="resume")
    mark(FusedTrainerMixin, "_load_optimizer_and_scheduler", "resume", after="resume")
    mark(Trainer, "evaluate", "evaluation")
    mark(RunFolder, "save_model", "end")
    cli.main()


@contextmanager
def sampled(folder: Path) -> Iterator[Figures]:
    """Samples the processes that write their phases into a folder. Its value gets the peaks when they have ended."""
    folder.mkdir()
    samples: dict[str, list[tuple[float, dict[str, int]]]] = {}
    peaks: Figures = {}

    def sample() -> None:
        for path in folder.iterdir():
            with suppress(OSError):  # it has ended
                samples.setdefault(path.name, []).append((time.monotonic(), resident(path.name)))

    try:
        with repeated(sample, 0.01):
            yield peaks
    finally:
        for process, rows in samples.items():
            marks = [line.split(" ", 1) for line in (folder / process).read_text().splitlines()]
            for moment, sizes in filter(all, rows):  # the last ones may be empty
                phase = ["idle", *(name for start, name in marks if float(start) <= moment)][-1]
                over = {kind: size - rows[0][1][kind] for kind, size in sizes.items()}
                for name, size in ((phase, over["own"] + over["shared"]), (f"{phase}{MAPPED}", sum(over.values()))):
                    peaks[name] = max(peaks.get(name, 0), size)


def write_inputs(folder: Path) -> None:
    """Writes the model, texts, and the arguments that all runs share."""
    texts, tokenizer = corpus()
    llama(*SIZES, "float32").save_pretrained(folder / "model", max_shard_size="400MB")
    tokenizer.save_pretrained(folder / "model")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:ROWS]))
    write_config(folder)


def write_config(folder: Path) -> None:
    """Writes the arguments that all runs share."""
    config = {
        "model_name_or_path": str(folder / "model"), "dtype": "float32", "max_length": TOKENS, "max_steps": STEPS,
        "datasets": [{"path": "json", "data_files": str(folder / "texts.jsonl")}], "max_grad_norm": 0,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "eval_strategy": "steps",
        "eval_steps": STEPS, "save_steps": 1, "dataset_test_split": "train", "report_to": "none",
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def measure(case: str, folder: Path) -> Figures:
    """Trains and resumes. Returns the peaks of all phases in bytes."""
    ranks, words, rule = CASES[case]
    run = ["benchmarks.phases", "sft", f"--config={folder}/config.yaml", *rule, *words, f"--output_dir={folder}/run"]
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=folder) as where:
        for name, more in (("trained", []), ("resumed", ["--resume_from_checkpoint=last"])):
            with sampled(Path(where, name)) as peaks:
                marks = {MARKS: str(Path(where, name))}
                execute([*run, *more], Path(where, "log"), ranks, environment=marks)
            figures = {phase: max(figures.get(phase, 0), peaks.get(phase, 0)) for phase in {**figures, **peaks}}
            shutil.rmtree(folder / "run" / f"checkpoint-{STEPS}")
    return figures


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Peaks by phase in MiB."""
    rows = []
    for case, figures in report["results"].items():
        row = {"run": case} | {phase: f"{figures[phase] / 2**20:,.0f}" for phase in PHASES}
        for kind in ("", MAPPED):
            first, step, *others = (figures[f"{phase}{kind}"] for phase in ("first step", "step", *OTHERS))
            row[f"largest / step{kind}"] = f"{max(others) / max(first, step):.2f}"
        rows.append(row)
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = reports.make_parser(__doc__ or "", {}, dtype=False, only="run").parse_args(argv)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # otherwise glibc keeps freed tensors of up to 32 MiB
    file = options.out / "phases.json"
    results = json.loads(file.read_text())["results"] if options.only and file.exists() else {}
    with reports.output(options.out), tempfile.TemporaryDirectory(prefix="lowmem-bench-") as folder:
        write_inputs(Path(folder))
        for case in options.only or CASES:
            try:
                results[case] = measure(case, Path(folder))
            except MeasurementError as error:
                print(f"{case} failed: {error}", file=sys.stderr)
            shutil.rmtree(Path(folder, "run"), ignore_errors=True)
        results = {case: results[case] for case in CASES if case in results}
        reports.publish(options.out, "phases", {"sizes": SIZES, "tokens": TOKENS}, tables, results=results)


if __name__ == "__main__":
    if MARKS in os.environ:
        marked(Path(os.environ[MARKS]))
    main()
