"""Draws when gradients exist and weights are updated under each policy: a picture for docs/reference/policies.md.

    python -m benchmarks.timeline --out benchmarks/results

It is a drawing of four layers, not a measurement; `benchmarks.policies` measures.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.reports import command, picture

LAYERS = 4
COLORS = {
    "forward": "#c9ced6", "backward": "#1f5fa8", "update": "#2a8f7c", "norm measured": "#e08e2b",
    "gradients in memory": "#d1495b", "gradients on the host": "#e7b3ba",
}  # fmt: skip
POLICIES = {
    "immediate": "each parameter is updated as soon as its gradient is complete",
    "two_pass": "backward runs twice: to measure the norm of all gradients, then to update",
    "deferred": "gradients are offloaded; updates follow when the norm is known",
    "ordinary training": "all gradients are in memory when the optimizer steps",
}

Block = tuple[str, float, float]  # kind, start, length
Gradients = tuple[float, float, float, float]  # start, length, on the device, on the host; in layers


def step(policy: str) -> Iterator[Block | Gradients]:
    """The blocks of a step, and the gradients that exist meanwhile."""
    yield "forward", 0, LAYERS
    now = float(LAYERS)
    for layer in range(LAYERS):
        yield "backward", now, 1
        if policy == "immediate":
            yield "update", now + 1, 0.35
            yield now + 0.6, 0.75, 1, 0
            now += 1.35
        elif policy == "two_pass":
            yield "norm measured", now + 1, 0.12
            yield now + 0.6, 0.52, 1, 0
            now += 1.12
        else:
            before, host = (layer, 0) if policy == "ordinary training" else (0, layer)
            yield now + 0.6, 1 if layer < LAYERS - 1 else 0.4, before + 1, host
            now += 1
    for _ in range(LAYERS if policy == "two_pass" else 0):
        yield "backward", now, 1
        yield "update", now + 1, 0.35
        yield now + 0.6, 0.75, 1, 0
        now += 1.35
    for layer in range(LAYERS if policy in ("deferred", "ordinary training") else 0):
        yield "update", now, 0.35
        left = LAYERS - layer
        yield now, 0.35, *((LAYERS, 0) if policy == "ordinary training" else (1, left - 1))
        now += 0.35


def draw(path: Path) -> None:
    with picture(path, "One step of a model with four layers", (10, 5.2), 1) as axis:
        for row, (policy, words) in enumerate(POLICIES.items()):
            base = -row * 1.75
            axis.text(0, base + 1.02, policy, fontsize=11, fontweight="bold")
            axis.text(2.8, base + 1.02, words, fontsize=9, color="#555555")
            for block in step(policy):
                if isinstance(block[0], str):
                    kind, start, length = block
                    axis.barh(base + 0.72, length, left=start, height=0.44, color=COLORS[kind], edgecolor="white")
                else:
                    start, length, device, host = block
                    heights = {"gradients in memory": device, "gradients on the host": host}
                    bottom: Any = base - 0.17
                    for kind, count in heights.items():
                        size = {"height": 0.15 * count, "bottom": bottom, "width": length, "align": "edge"}
                        axis.bar(start, color=COLORS[kind], **size)
                        bottom += 0.15 * count
        arrow = {"arrowstyle": "->", "color": "#555555"}
        axis.annotate("", (9.4, base - 0.45), (0, base - 0.45), arrowprops=arrow)
        axis.text(4.7, base - 0.75, "time", fontsize=9, color="#555555", ha="center")
        for kind, color in COLORS.items():
            axis.bar(0, 0, color=color, label=kind)
        axis.set_axis_off()
        axis.set(xlim=(-0.1, 16.5), ylim=(base - 0.85, 1.35))
        axis.legend(loc="lower right", fontsize=9, frameon=False, ncols=2)


@command
def main(argv: Sequence[str] | None = None) -> None:
    out = reports.make_parser(__doc__, {}, dtype=False).parse_args(argv).out
    with reports.output(out):
        draw(out / "timeline.png")


if __name__ == "__main__":
    main()
