"""Runs that are killed at random moments and resumed: how many end as a run that was never killed.

    python -m benchmarks.crashes [--kills 50] [--only local] [--seed 0]

A small run is trained once without a crash. Then it is started again and killed by SIGKILL, resumed and killed, for a
random number of times, and resumed until it is complete. Half of the kills come at any time, the others while a
checkpoint is written, renamed or removed, or while the report is drawn. The last checkpoint is compared file by file,
and every logged loss with that of the same step.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import reports

ROOT = Path(__file__).parent.parent
STEPS = 24
TOPICS = ("a list", "the path", "a number", "the name", "one file", "the lock", "a queue", "the tree")
# What shows that a run is doing something now: paths in its folder.
MOMENTS = {
    "writing a checkpoint": ".saving/*/model.safetensors",
    "finishing a checkpoint": ".saving/*/checksums.txt",
    "removing a checkpoint": ".removed",
    "drawing": "loss.png",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
SECONDS = 600  # until a run counts as hanging


@dataclass
class Setting:
    """How the runs of a row are started."""

    overrides: tuple[str, ...] = ()
    ranks: int = 1
    adapters: bool = False


ZERO3 = (
    "trainer.deepspeed={zero_optimization: {stage: 3}, train_micro_batch_size_per_gpu: auto, train_batch_size: auto}"
)
SETTINGS = {
    "local": Setting(("optimizer.rule=adamw", "optimizer.rounding=stochastic", "model.dtype=bfloat16")),
    "deferred": Setting(("optimizer.clip_norm=1.0", "trainer.gradient_accumulation_steps=2", "data.packing=true")),
    "adapters": Setting(adapters=True),
    "ZeRO-3, 2 ranks": Setting((ZERO3,), ranks=2),
    "FSDP2, 2 ranks": Setting(("trainer.fsdp=true", "trainer.fsdp_config={version: 2}"), ranks=2),
}


@dataclass
class Outcome:
    """What became of the runs of a setting."""

    runs: int = 0
    identical: int = 0
    kills: Counter[str] = field(default_factory=Counter)  # number by moment
    passed_over: int = 0  # checkpoints that a resumed run found damaged
    problems: list[str] = field(default_factory=list)


def write_config(folder: Path) -> Path:
    """A run of a few seconds that saves, evaluates, rotates checkpoints and draws."""
    pairs = [{"instruction": f"def get_{i}(self)", "output": f"Return {TOPICS[i % 8]} of {i}."} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "attention_dropout": 0.1}  # fmt: skip
    config = {
        "run_dir": str(folder / "run"),
        "model": {"config": {"model_type": "llama", **sizes}, "train_tokenizer": {"vocab_size": 300},
                  "dtype": "float32"},
        "data": {"path": str(folder / "pairs.jsonl"), "eval_fraction": 0.2, "max_length": 64},
        "optimizer": {"rule": "adalomo", "lr": 0.02},
        "trainer": {
            "max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 3, "save_steps": 2,
            "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 6, "dataloader_pin_memory": False,
        },
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))  # which is YAML
    return path


class Run:
    """One process, or several under torchrun, that trains or resumes in a folder."""

    def __init__(self, setting: Setting, config: Path, run_dir: Path) -> None:
        resume = ["--resume"] if (run_dir / "config.yaml").exists() or list(run_dir.glob("checkpoint-*")) else []
        words = ["train", str(config), f"run_dir={run_dir}", *setting.overrides, *resume]
        run_dir.parent.mkdir(exist_ok=True, parents=True)
        self.log = run_dir.with_suffix(".log")
        if setting.ranks > 1:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(setting.ranks)]
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [*launch, "--master_port", str(random.randint(20_000, 60_000)), "-m", "lowmem", *words], stdout=log,
                    stderr=log, start_new_session=True, env={**os.environ, **ENVIRONMENT},
                )  # fmt: skip
            self.pid = self.process.pid
        else:
            self.pid = self._fork((lambda: train_adapters(run_dir)) if setting.adapters else (lambda: lowmem(words)))

    def _fork(self, work: Callable[[], None]) -> int:
        """Forks a process that has imported everything: starting Python would take most of the time."""
        if pid := os.fork():
            return pid
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        status = 1
        try:
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    def ended(self) -> int | None:
        """The exit status, None while it runs."""
        if hasattr(self, "process"):
            return self.process.poll()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self) -> None:
        """Kills all processes at once. torchrun starts each rank in a session of its own."""
        run = psutil.Process(self.pid)
        for process in [run, *run.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while self.ended() is None:
            time.sleep(0.001)


def lowmem(words: list[str]) -> None:
    from lowmem.cli import main

    main(words)


def train_adapters(run_dir: Path) -> None:
    """LoRA by a trainer of the user's own."""
    import peft
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from lowmem import FusedConfig
    from lowmem.trainer import FusedTrainer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(64, (48, 12), generator=torch.Generator().manual_seed(1)).tolist()
    args = TrainingArguments(
        str(run_dir), max_steps=STEPS, per_device_train_batch_size=4, save_steps=2, save_total_limit=2,
        logging_steps=3, report_to="none", use_cpu=True, learning_rate=1e-2, max_grad_norm=0, seed=7,
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = FusedTrainer(model, args=args, fused=FusedConfig(rule="adamw"), train_dataset=data)
    trainer.train(resume_from_checkpoint=bool(list(run_dir.glob("checkpoint-*"))))


def wait(run: Run, until: Callable[[], bool]) -> int | None:
    """Waits until something has happened or the run has ended; returns the exit status then."""
    end = time.monotonic() + SECONDS
    while not until():
        if (status := run.ended()) is not None:
            return status
        if time.monotonic() > end:
            run.kill()
            raise TimeoutError(f"no end after {SECONDS} s")
        time.sleep(0.0005)
    return None


def killed_run(setting: Setting, config: Path, run_dir: Path, seconds: float, chance: random.Random) -> Iterator[str]:
    """Trains with one to four kills, yielding the moment of each, until the run is complete."""
    for _ in range(chance.randint(1, 4)):
        run = Run(setting, config, run_dir)
        moment = chance.choice(["any time", "any time", *MOMENTS])
        if moment == "any time":
            at = time.monotonic() + chance.uniform(0, seconds)
            status = wait(run, lambda at=at: time.monotonic() > at)  # type: ignore[misc]
        else:
            skipped, begun = chance.randint(0, 6), set()

            def seen(pattern: str = MOMENTS[moment], skipped: int = skipped, begun: set[int] = begun) -> bool:
                with contextlib.suppress(OSError):  # it is gone already
                    begun |= {path.stat().st_ino for path in run_dir.glob(pattern)}
                return len(begun) > skipped

            status = wait(run, seen)
            time.sleep(chance.choice([0, 0.0005, 0.002, 0.01]))
        if status is None:
            run.kill()
            yield moment
        elif status:
            raise ChildProcessError(f"exit status {status}: {run.log.read_text()[-600:]}")
    if status := wait(run := Run(setting, config, run_dir), lambda: False):
        raise ChildProcessError(f"exit status {status}: {run.log.read_text()[-600:]}")


def results(run_dir: Path) -> dict[str, Any]:
    """What must not depend on crashes: the files of the last checkpoint by content, and the losses by step."""
    checkpoint = run_dir / f"checkpoint-{STEPS}"
    lines = (checkpoint / "checksums.txt").read_text().splitlines()
    files = {name: checksum for checksum, name in (line.split("  ", 1) for line in lines)}
    for name in ("trainer_state.json", "training_args.bin"):  # have times, and the path of the folder
        files.pop(name, None)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    losses = {f"loss at {entry['step']}": entry["loss"] for entry in state["log_history"] if "loss" in entry}
    if (run_dir / "metrics.jsonl").exists():
        records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        losses |= {
            f"{key} of {r['step']}": r[key] for r in records for key in ("loss", "eval_loss", "tokens") if key in r
        }
        # a run that is killed right after its last save keeps one checkpoint more
        names = {path.name for path in run_dir.iterdir() if not path.name.startswith((".", "checkpoint-"))}
        losses["files"] = sorted(names)
    return files | losses


def measure(setting: Setting, kills: int, seed: int, folder: Path, console: Console, name: str) -> Outcome:
    """Kills runs of a setting until there were so many kills."""
    outcome, chance = Outcome(), random.Random(seed)
    config = write_config(folder)
    begin = time.monotonic()
    if status := wait(run := Run(setting, config, folder / "whole"), lambda: False):
        raise ChildProcessError(f"{name}: exit status {status}: {run.log.read_text()[-2000:]}")
    seconds, expected = time.monotonic() - begin, results(folder / "whole")
    while sum(outcome.kills.values()) < kills:
        run_dir = folder / f"run-{outcome.runs}"
        outcome.runs += 1
        moments: list[str] = []
        try:
            for moment in killed_run(setting, config, run_dir, seconds, chance):
                moments.append(moment)
                outcome.kills[moment] += 1
            found = results(run_dir)
            outcome.passed_over += run_dir.with_suffix(".log").read_text().count("skipped a damaged checkpoint")
            if different := [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]:
                outcome.problems.append(f"{run_dir.name} ({', '.join(moments)}): {', '.join(sorted(different)[:5])}")
            else:
                outcome.identical += 1
                shutil.rmtree(run_dir)
        except (OSError, ValueError, KeyError) as error:
            outcome.problems.append(f"{run_dir.name} ({', '.join(moments)}): {error}")
        console.print(
            f"{name}: {sum(outcome.kills.values())} kills, {outcome.identical} of {outcome.runs} runs identical"
        )
    return outcome


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a run did not end as it would have without crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of runs on one device; others have a fifth (50)")
    parser.add_argument("--only", action="append", choices=SETTINGS, help="only this setting; can be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args(argv)
    os.environ |= ENVIRONMENT
    import lowmem.cli
    import lowmem.run.training  # noqa: F401 (imported before processes are forked)

    console = Console()
    with reports.output(arguments.out, "crashes"):
        rows = {}
        for name in arguments.only or SETTINGS:
            kills = arguments.kills if name == "local" else max(1, arguments.kills // 5)
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = measure(SETTINGS[name], kills, arguments.seed, Path(folder), console, name)
        settings = {"kills": arguments.kills, "seed": arguments.seed, "steps": STEPS}
        reports.save(arguments.out / "crashes.json", settings, runs={name: vars(row) for name, row in rows.items()})
    for row in rows.values():
        for problem in row.problems:
            console.print(problem, style="red", markup=False, soft_wrap=True)
    return int(any(row.problems for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
