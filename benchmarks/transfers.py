"""Bytes that a training step copies to a GPU and back: streamed weights, and DeepSpeed's ZeRO-3 with `offload_param`.

    python -m benchmarks.transfers [--layers 12 --hidden 256 --tokens 16] [--out benchmarks/results]

A Llama with float32 weights and activation checkpointing is trained by AdaLomo in one process. Copies and the memory of
the device are counted on the simulated GPU of the tests (tests/support/simgpu), which has no times. A second process
takes the same steps on the CPU, where the host is the device, and measures their processor time. ZeRO-3 is lowmem's
placement with the configuration `configs/zero3_offload.json`. Of its thresholds in parameters, those that would keep a
model of this size on the device are scaled by the size of the model, from Llama-3.1-8B.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lowmem
from benchmarks import reports
from benchmarks.measurement import llama, loss_of
from benchmarks.pages import ROOT, markdown
from benchmarks.processes import MeasurementError
from benchmarks.reports import command

VOCABULARY, STEPS = 2048, 8
# Programs of new processes, by device. The GPU has to be there before torch is imported.
MEASURE = "from benchmarks.transfers import answer; answer()"
PROGRAMS = {"cpu": MEASURE, "cuda": f"from support import simgpu; simgpu.install(); {MEASURE}"}
EIGHT_BILLION = 8_030_261_248  # parameters of Llama-3.1-8B
# DeepSpeed's defaults for parameters that stay gathered, and how soon one has to be needed again to stay
LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
WAYS = ("host to device", "device to host")


def local(options: argparse.Namespace, device: str) -> Any:
    return _llama(options).to(device)


def streamed(options: argparse.Namespace, device: str, share: float | None = None) -> Any:
    model = _llama(options)
    budget = None if share is None else int(share * sum(param.nbytes for param in model.parameters()))
    lowmem.stream(model, device, device_memory=budget)
    return model


def zero3(options: argparse.Namespace, device: str, live: dict[str, float] = LIVE) -> Any:
    """A model whose parameters DeepSpeed stores in pinned host memory."""
    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # a build for CPUs has none
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at the first use
    # collectives of one rank, which do nothing: gloo has none for a GPU
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        setattr(dist, name, _scatter)
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    hidden, parameters = options.hidden, sum(param.numel() for param in _llama(options, "meta").parameters())
    config = json.loads((ROOT / "configs" / "zero3_offload.json").read_text())
    config["zero_optimization"] |= {
        "reduce_bucket_size": hidden**2, "stage3_prefetch_bucket_size": hidden**2 * 9 // 10,
        "stage3_param_persistence_threshold": hidden * 10,
        **{name: int(value * parameters / EIGHT_BILLION) for name, value in live.items()},
    }  # fmt: skip
    config = {"zero_optimization": config["zero_optimization"], "train_micro_batch_size_per_gpu": 1}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _llama(options)
    return deepspeed.initialize(model=model, config=config)[0].module


def _llama(options: argparse.Namespace, device: str = "cpu") -> Any:
    return llama(options.layers, options.hidden, options.hidden * 3, VOCABULARY, "float32", device)


class _Done:
    def wait(self) -> None:
        """It has ended."""


def _scatter(shard: torch.Tensor, full: torch.Tensor, **options: Any) -> _Done:
    shard.copy_(full.view(-1)[: shard.numel()])
    return _Done()


CLIPPED = {"clip_norm": 1.0}
# Name → function that places the model, and options of the optimizer
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "local": (local, {}),
    "streamed": (streamed, {}),
    "streamed, half of the weights on the device": (partial(streamed, share=0.5), {}),
    "streamed, clipped by `two_pass`": (streamed, {"policy": "two_pass", **CLIPPED}),
    "streamed, clipped by `deferred`": (streamed, {"policy": "deferred", **CLIPPED}),
    "ZeRO-3, `offload_param`": (zero3, {}),
    "ZeRO-3, `offload_param`, nothing released": (partial(zero3, live=dict.fromkeys(LIVE, 9.0 * EIGHT_BILLION)), {}),
}


def measure(name: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains in this process, and returns figures of a step."""
    place, settings = METHODS[name]
    model = place(options, device)
    opt = lowmem.FusedOptimizer(model.named_parameters(), "adalomo", lr=1e-3, model=model, compile=False, **settings)
    ids = torch.randint(VOCABULARY, (1, options.tokens), device="cpu").to(device)
    compute, seconds = loss_of(model, ids), list[float]()
    for _ in range(STEPS):
        start = time.process_time()
        opt.backward(compute)
        seconds.append(time.process_time() - start)
    if device == "cpu":
        return {"seconds": min(seconds[2:])}
    from support import simgpu

    torch.cuda.reset_peak_memory_stats()
    with simgpu.watch("async", "sync", "pageable") as events:
        opt.backward(compute)
        torch.cuda.synchronize()
    sizes, copies = Counter[str](), Counter[str]()
    for event in events:
        for way in WAYS:
            if event.what.startswith(way) and event.size > 1024:  # smaller ones are numbers of a step
                sizes[way] += event.size
                copies[way] += 1
                if "zero3.py" in event.where.partition(" <")[0]:
                    sizes[f"{way}, update"] += event.size
    counts = {"bytes": dict(sizes), "copies": dict(copies), "peak": torch.cuda.max_memory_allocated()}
    layers = model.model.layers.parameters()
    return counts | {
        "weights": sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters()),
        "layers": sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in layers),
    }


def in_process(name: str, device: str, words: Sequence[str]) -> dict[str, Any]:
    """Measures a step in a new process."""
    variables = {"DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        run = [sys.executable, "-c", PROGRAMS[device], name, device, str(file), *words]
        done = subprocess.run(run, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
        if done.returncode:
            raise MeasurementError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(file.read_text())  # type: ignore[no-any-return]


def answer() -> None:
    """Runs in the new process."""
    name, device, file, *words = sys.argv[1:]
    Path(file).write_text(json.dumps(measure(name, device, _parser().parse_args(words))))


def tables(report: Any) -> dict[str, str]:
    def cell(row: Any, way: str) -> str:
        size, copies = (row[kind].get(way, 0) for kind in ("bytes", "copies"))
        return f"{size / row['weights']:.2f} ({copies})" if size else "0"

    results = report["results"]
    return {
        "": markdown(
            [
                {
                    "one step": name,
                    **{f"{way}, × weights (copies)": cell(row, way) for way in WAYS},
                    "peak on the device, × weights": f"{row['peak'] / row['weights']:.2f}",
                    "processor time on a CPU, × local": f"{row['seconds'] / results['local']['seconds']:.2f}",
                }
                for name, row in results.items()
            ]
        )
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    counts = {"layers": (12, "layers of the Llama"), "hidden": (256, "its hidden size"), "tokens": (16, "per step")}
    return reports.make_parser(__doc__ or "", counts, dtype=False)


@command
def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(words)
    with reports.output(options.out):
        results = {}
        for name in METHODS:
            print(name, flush=True)
            results[name] = {**in_process(name, "cuda", words), **in_process(name, "cpu", words)}
        settings = {key: getattr(options, key) for key in ("layers", "hidden", "tokens")} | {"dtype": "float32"}
        reports.publish(options.out, "transfers", settings, tables, results=results)


if __name__ == "__main__":
    main()
