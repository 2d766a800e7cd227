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

import lowmem.cli
from benchmarks import reports
from lowmem.files import checksum
from scripts.make_model import make_model, train_tokenizer

ROOT = Path(__file__).parent.parent
STEPS = 24
TOPICS = ("a list", "the path", "a number", "the name", "one file", "the lock", "a queue", "the tree")
# What shows that a run is doing something now: paths in its folder.
MOMENTS = {
    "writing a checkpoint": ".saving/*/model.safetensors",
    "finishing a checkpoint": ".saving/*/checksums.txt",
    "removing a checkpoint": ".removed",
    "drawing": "loss.png",
    "saving the final model": ".saving/model",
    "moving the final model": "tokenizer.json",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
SECONDS = 600  # until a run counts as hanging


@dataclass
class Setting:
    """How the runs of a row are started."""

    arguments: tuple[str, ...]
    ranks: int = 1


SETTINGS = {
    "local": Setting(("--fused.rule", "adamw", "--fused.rounding", "stochastic", "--dtype", "bfloat16")),
    "deferred": Setting(("--max_grad_norm", "1", "--gradient_accumulation_steps", "2", "--packing", "true")),
    "adapters": Setting(("--use_peft", "true", "--lora_r", "4", "--lora_dropout", "0.1", "--fused.rule", "adamw")),
    "ZeRO-3, 2 ranks": Setting(("--deepspeed", str(ROOT / "configs" / "zero3.json")), ranks=2),
    "FSDP2, 2 ranks": Setting(("--fsdp",), ranks=2),
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
    pairs = [{"prompt": f"def get_{i}(self)", "completion": f"Return {TOPICS[i % 8]} of {i}."} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "attention_dropout": 0.1}  # fmt: skip
    make_model(folder / "model", train_tokenizer((text for pair in pairs for text in pair.values()), 300), **sizes)
    config = {
        "model_name_or_path": str(folder / "model"), "dtype": "float32", "max_length": 64, "test_split_size": 0.2,
        "datasets": [{"path": "json", "data_files": str(folder / "pairs.jsonl")}], "fused": {"rule": "adalomo"},
        "learning_rate": 0.02, "max_grad_norm": 0, "max_steps": STEPS, "per_device_train_batch_size": 4,
        "logging_steps": 1, "save_steps": 2, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 6,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))  # which is YAML
    return path


class Run:
    """One process, or several under torchrun, that trains or resumes in a folder."""

    def __init__(self, setting: Setting, config: Path, run_dir: Path) -> None:
        resume = ["--resume_from_checkpoint", "last"] if (run_dir / "config.yaml").exists() else []
        words = ["sft", "--config", str(config), "--output_dir", str(run_dir), *setting.arguments, *resume]
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
            self.pid = self._fork(words)

    def _fork(self, words: list[str]) -> int:
        """Forks a process that has imported everything: starting Python would take most of the time."""
        if pid := os.fork():
            return pid
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        status = 1
        try:
            lowmem.cli.main(words)
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
            skipped, begun = 0 if "final" in moment else chance.randint(0, 6), set()

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
    """What must not depend on crashes: the last checkpoint and the final model by content, and the losses by step."""
    checkpoint = run_dir / f"checkpoint-{STEPS}"
    lines = (checkpoint / "checksums.txt").read_text().splitlines()
    files = {name: checksum for checksum, name in (line.split("  ", 1) for line in lines)}
    for name in ("trainer_state.json", "training_args.bin"):  # have times, and the path of the folder
        files.pop(name, None)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    files["final model"] = checksum(*run_dir.glob("*model.safetensors"))
    losses = {f"loss at {entry['step']}": entry["loss"] for entry in state["log_history"] if "loss" in entry}
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses |= {f"{key} of {r['step']}": r[key] for r in records for key in ("loss", "eval_loss", "tokens") if key in r}
    # a run that is killed right after its last save keeps one checkpoint more
    losses["files"] = sorted(path.name for path in run_dir.iterdir() if not path.name.startswith((".", "checkpoint-")))
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
    import trl.scripts.sft  # noqa: F401 (imported before processes are forked)

    import lowmem.run.training  # noqa: F401

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
