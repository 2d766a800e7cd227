"""What a run leaves for people: pictures, and a README with the results and how to continue."""

import math
import statistics
from pathlib import Path

from lowmem.errors import LowmemError
from lowmem.files import write_file
from lowmem.hf.checkpoint import by_number
from lowmem.run.metrics import METRICS, Record, nonfinite, read_metrics
from lowmem.run.pictures import draw, loss_keys, series, size
from lowmem.run.terminal import generate_command, train_command


def plot_run(run_dir: str | Path) -> list[Path]:
    """Draws a run's pictures into its folder; needs only its metrics.jsonl."""
    folder = Path(run_dir)
    records = read_metrics(folder)
    if not records:
        raise LowmemError(f"{folder / METRICS}: nothing is logged yet, so there is nothing to draw.")
    pictures = draw(records, folder.resolve().name)
    for name, png in pictures.items():
        write_file(folder / name, png)
    return [folder / name for name in pictures]


_FILES = {
    "config.yaml": "the full configuration, including overrides; `lowmem train` accepts it",
    "environment.json": "machine, versions, git commit and command of the latest start",
    "metrics.jsonl": "every logged number, one JSON object per line",
    "loss.png": "training and evaluation loss, gradient norm, learning rate, clip coefficient, loss scale",
    "memory.png": "memory in use, its peak, and the size of the weights",
    "runs": "TensorBoard files; view them with `tensorboard --logdir` and this folder",
}


def write_readme(run_dir: str | Path) -> None:
    """Writes README.md into the run folder: results, files, and how to continue."""
    folder = Path(run_dir)
    checkpoints = by_number(folder)
    files = [f"| [{name}]({name}) | {content} |" for name, content in _FILES.items() if (folder / name).exists()]
    files += [f"| {path.name}/ | a Hugging Face model folder with optimizer states |" for path in checkpoints]
    pictures = [f"![{name}]({name})" for name in _FILES if name.endswith(".png") and (folder / name).exists()]
    lines = [
        f"# {folder.resolve().name}", "",
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in _results(read_metrics(folder))), "",
        *pictures, "",
        "## Files", "", "| file | content |", "| --- | --- |", *files, "",
        "## Continue", "", *_continue(folder, checkpoints),
    ]  # fmt: skip
    write_file(folder / "README.md", ("\n".join(lines) + "\n").encode())


def last_losses(records: list[Record]) -> list[tuple[str, float]]:
    """The names of the losses of a run, and the last value of each."""
    values = [(key, series(records, key)[1]) for key in ("loss", *loss_keys(records))]
    return [(_loss_name(key), losses[-1]) for key, losses in values if losses]


def _loss_name(key: str) -> str:
    return "training loss" if key == "loss" else key.replace("_", " ").replace("eval", "evaluation")


def _results(records: list[Record]) -> list[tuple[str, str]]:
    """Names and values for the table of results."""
    results = [("steps", f"{records[-1]['step']:,}"), ("tokens", f"{records[-1]['tokens']:,}")]
    for key in ("loss", *loss_keys(records)):
        losses = [(loss, step) for step, loss in zip(*series(records, key), strict=True)]
        lowest, at_step = min((pair for pair in losses if math.isfinite(pair[0])), default=(math.nan, 0))
        if losses:
            results.append((_loss_name(key), f"{losses[-1][0]:.4f} (lowest {lowest:.4f}, at step {at_step:,})"))
    if rates := [value for value in series(records, "tokens_per_second")[1] if math.isfinite(value)]:
        results.append(("tokens/s, median", f"{statistics.median(rates):,.0f}"))
    if coefs := [value for value in series(records, "clip_coef")[1] if value > 0]:  # 0 is that of an infinite norm
        results.append(("clipped", f"{sum(value < 1 for value in coefs) / len(coefs):.0%} of the logged steps"))
    if skipped := [record for record in records if record.get("nonfinite_steps")]:
        count = f"{skipped[-1]['nonfinite_steps']:,}, with a gradient that was not finite"
        results.append((nonfinite(skipped[-1]), count))
    peak = max(record["peak_memory"] for record in records)
    return [*results, ("peak memory", f"{size(peak)} (weights {size(records[-1]['weight_bytes'])})")]


def _continue(folder: Path, checkpoints: list[Path]) -> list[str]:
    if not checkpoints:
        return ["No checkpoint was saved, so this run cannot be continued. Set a smaller `trainer.save_steps`."]
    load = f'model = AutoModelForCausalLM.from_pretrained("{checkpoints[-1]}", dtype="auto")'
    return [
        "```sh", f"{train_command(folder)}     # from the newest checkpoint",
        generate_command(folder), "```", "",
        "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "", load,
        f'tokenizer = AutoTokenizer.from_pretrained("{checkpoints[-1]}")', "```",
    ]  # fmt: skip
