"""Memory, open files and threads of a long run of the command line, sampled from outside.

    python -m benchmarks.endurance [--minutes 60]

The quickstart trains on without an end, with a checkpoint every 200 steps, evaluation and rotation, until SIGTERM stops
it. What a step leaves behind shows as a slope over the samples after the first tenth.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import yaml
from rich.progress import track

from benchmarks import reports
from benchmarks.reports import command, make_parser, output, picture, print_table

ROOT = Path(__file__).parent.parent
SECONDS = 5  # between two samples
ARGUMENTS = (
    "--max_steps", "1000000000", "--lr_scheduler_type", "constant", "--save_steps", "200", "--save_total_limit", "2",
    "--logging_steps", "10", "--eval_steps", "500",
)  # fmt: skip


@dataclass
class Sample:
    """The process at one moment."""

    minutes: float
    mebibytes: float  # resident
    files: int  # open files, sockets and pipes
    threads: int
    children: int


def sample(process: psutil.Process, start: float) -> Sample:
    with process.oneshot():
        memory, files, threads = process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
    return Sample((time.monotonic() - start) / 60, memory, files, threads, len(process.children(recursive=True)))


def watch(minutes: int, folder: Path) -> tuple[list[Sample], dict[str, float]]:
    """Trains in `folder` for so long; the samples, and what the run did."""
    data, model = folder / "docstrings.jsonl", folder / "model"
    for words in (("make_docstrings.py", "--out", data), ("make_model.py", "--data", data, "--out", model)):
        subprocess.run([sys.executable, ROOT / "scripts" / words[0], *words[1:]], check=True, cwd=ROOT)
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config |= {"output_dir": f"{folder}/run", "model_name_or_path": str(model)}
    config["datasets"] = [{"path": "json", "data_files": str(data)}]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    words = ("sft", "--config", f"{folder}/config.yaml", *ARGUMENTS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log.txt").open("w") as log:
        start_run = [sys.executable, "-m", "lowmem", *words]
        run = subprocess.Popen(start_run, cwd=ROOT, env=environment, stdout=log, stderr=log)
    process, start, samples = psutil.Process(run.pid), time.monotonic(), []
    for _ in track(range(minutes * 60 // SECONDS), "training"):
        time.sleep(SECONDS)
        samples.append(sample(process, start))
    run.send_signal(signal.SIGTERM)
    status = run.wait(timeout=600)
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    steps = last["step"]
    return samples, {"steps": steps, "checkpoints": steps // 200 + 1, "tokens": last["tokens"], "exit": status}


def slope(samples: list[Sample]) -> float:
    """Mebibytes per hour, by the median of the slopes between the two halves of the samples."""
    steady = samples[len(samples) // 10 :]
    half = len(steady) // 2
    rates = [
        (later.mebibytes - earlier.mebibytes) / (later.minutes - earlier.minutes) * 60
        for earlier, later in zip(steady[:half], steady[half:], strict=False)
    ]
    return float(np.median(rates))


def draw(path: Path, samples: list[Sample], figures: dict[str, float]) -> None:
    title = f"{figures['steps']:,} steps in {samples[-1].minutes:.0f} minutes, {figures['checkpoints']:.0f} checkpoints"
    minutes = [one.minutes for one in samples]
    shown = {"mebibytes": "resident memory (MiB)", "files": "open files", "threads": "threads"}
    with picture(path, title, (11, 3.4), len(shown), width_ratios=[2, 1, 1]) as panels:
        for axes, (name, label) in zip(panels, shown.items(), strict=True):
            axes.plot(minutes, [getattr(one, name) for one in samples], color="#2b6cb0", lw=1.3)
            axes.set(title=label, xlabel="minutes", ylim=(0, None))


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, {"minutes": (60, "minutes to train")}, dtype=False)
    arguments = parser.parse_args(argv)
    with output(arguments.out, "endurance"), tempfile.TemporaryDirectory() as folder:
        samples, figures = watch(arguments.minutes, Path(folder))
        steady = samples[len(samples) // 10 :]
        figures |= {
            "mebibytes_per_hour": slope(samples), "first_mebibytes": steady[0].mebibytes,
            "last_mebibytes": steady[-1].mebibytes, "most_mebibytes": max(one.mebibytes for one in samples),
        }  # fmt: skip
        for name in ("files", "threads", "children"):
            values = [getattr(one, name) for one in steady]
            figures |= {f"fewest_{name}": min(values), f"most_{name}": max(values)}
        print_table(["figure", "value"], [[name, f"{value:,.6g}"] for name, value in figures.items()])
        settings = {"minutes": arguments.minutes, "seconds_between_samples": SECONDS}
        reports.save(arguments.out / "endurance.json", settings, figures=figures, samples=[*map(asdict, samples)])
        draw(arguments.out / "endurance.png", samples, figures)


if __name__ == "__main__":
    main()
