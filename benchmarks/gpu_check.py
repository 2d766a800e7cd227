"""Measures on a GPU, in under nine minutes, with nothing installed but torch and transformers.

    python -m benchmarks.gpu_check [--out gpu_check.json] [--budget 500] [--small]

Each part adds rows: what was measured, its goal if it has one, and whether the goal is met. The report is written after
every row, so that a run that is killed leaves it. If a part fails, its error is reported, and the others go on. A part
that needs more seconds than are left of the budget is skipped with a row that says so. `--small` shrinks everything, so
that the script itself can be tried without a GPU.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowmem
from benchmarks.gpu import overhead, steps, updates
from benchmarks.gpu.measure import COMPILES, GPU, device_seconds, draw, free_memory, median
from benchmarks.gpu.report import Report


def environment(report: Report, small: bool) -> None:
    import transformers

    report.row("lowmem", lowmem.__version__, small=small, python=platform.python_version(), cpus=os.cpu_count())
    report.row("torch", torch.__version__, cuda=torch.version.cuda, transformers=transformers.__version__)
    if GPU:
        device = torch.cuda.get_device_properties(0)
        report.row("device", device.name, bytes=device.total_memory, l2_bytes=device.L2_cache_size)
    report.row("free bytes of the device", free_memory())
    report.row("torch.compile has a compiler", COMPILES)


def attention(report: Report, small: bool) -> None:
    """Which kernels can compute the attention of an 8B Llama over 2,048 tokens, and which of them torch selects."""
    try:
        import flash_attn

        report.row("flash_attn", flash_attn.__version__)
    except ImportError as error:
        report.row("flash_attn", None, reason=str(error))
    tokens = 64 if small else 2048
    q, k, v = draw(1, 32, tokens, 128), draw(1, 8, tokens, 128), draw(1, 8, tokens, 128)

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    taken = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))
    report.row("SDPA selects", taken.name, seconds=median(device_seconds, attend))
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    for backend, is_enabled in enabled.items():
        what = f"SDPA, {backend.name}: seconds of a forward"
        try:
            with sdpa_kernel(backend):
                report.row(what, median(device_seconds, attend), enabled=is_enabled)
        except RuntimeError as error:  # no such kernel for these inputs
            report.row(what, None, enabled=is_enabled, reason=str(error).split("\n")[0])


# Each part with the seconds that it takes on an H200, compilation included.
PARTS: tuple[tuple[Callable[[Report, bool], None], float], ...] = (
    (environment, 5),
    (attention, 5),
    (updates.no_host_sync, 10),
    (updates.compiled_against_eager, 90),
    (updates.update_against_floor, 40),
    (updates.update_against_adamw, 20),
    (updates.dispatch, 10),
    (overhead.small_steps, 50),
    (overhead.first_step, 45),
    (steps.vocabulary_gradients, 10),
    (steps.eight_billion, 115),
    (updates.update_memory, 75),
    (steps.one_billion, 30),
    (steps.policies_agree, 20),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--budget", type=float, default=500, help="seconds, from the start")
    parser.add_argument("--small", action="store_true", help="sizes that any machine can try")
    options = parser.parse_args()
    report = Report(options.out, options.budget)
    for part, needs in PARTS:
        with report.part(part.__name__):
            if report.affords(part.__name__, needs):
                part(report, options.small)
    print(options.out.read_text())
    for row in report.goals():
        met = {True: "met", False: "NOT MET", None: "not measured"}[row["met"]]
        print(f"{row['what']}: {json.dumps(row['measured'])} (goal {row['goal']}): {met}", file=sys.stderr)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
