"""What a training step takes by one contender, in a process of its own.

On a GPU tensor memory is the most that the allocator has given out; on a CPU every allocation is counted.
"""

import gc
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.baselines import Contender

# Of one contender: seconds, first_step, tensor_peak and process_peak, the last on Linux only.
Figures = dict[str, float]

# Layers, hidden size and vocabulary of a Llama of about that many parameters.
SIZES = {
    "1M": (3, 128, 1024),
    "10M": (7, 256, 8192),
    "100M": (8, 768, 32000),
    "1B": (17, 2048, 32000),
    "7B": (32, 4096, 32000),
}


@dataclass(frozen=True)
class Workload:
    """The steps that are measured: how many, of `batch` rows of `tokens` tokens, by a Llama of one of `SIZES`."""

    size: str
    batch: int
    tokens: int
    dtype: Literal["bfloat16", "float32"]
    steps: int
    threads: int = field(default_factory=torch.get_num_threads)

    def settings(self) -> dict[str, Any]:
        """All of it in numbers; the weights in bytes."""
        layers, hidden, vocabulary = SIZES[self.size]
        layer = 4 * hidden**2 + 3 * hidden * _intermediate(hidden) + 2 * hidden
        parameters = 2 * vocabulary * hidden + layers * layer + hidden
        return {
            **asdict(self),
            "layers": layers,
            "hidden": hidden,
            "vocabulary": vocabulary,
            "parameters": parameters,
            "weights": parameters * getattr(torch, self.dtype).itemsize,
        }

    def model(self, device: str) -> nn.Module:
        """Random weights, with activation checkpointing."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        layers, hidden, vocabulary = SIZES[self.size]
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=_intermediate(hidden),
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model.train()


def _intermediate(hidden: int) -> int:
    """Llama's: two thirds of four times, up to the next multiple of 256."""
    return -(-hidden * 8 // 3 // 256) * 256


def measure(contender: Contender, workload: Workload) -> Figures:
    """One contender, in this process: seconds a step and of the first one, peak bytes of tensors and of the process."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    model = workload.model(device)
    step = contender.make(model)
    vocabulary = SIZES[workload.size][-1]
    rows = torch.randint(vocabulary, (workload.batch, workload.tokens), device=device)

    def loss_of(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    losses = [partial(loss_of, ids) for ids in rows.tensor_split(contender.micro_batches)]

    def timed() -> float:
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(losses)
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first, _ = timed(), timed()
    figures = {"seconds": statistics.median(timed() for _ in range(workload.steps)), "first_step": first}
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss begins with that of the process that started this one
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        figures["process_peak"] = int(peak.split()[1]) * 1024
    gc.collect()  # compiling leaves cycles behind that hold a gradient until the collector comes by
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        step(losses)
        figures["tensor_peak"] = torch.cuda.max_memory_allocated()
    else:
        figures["tensor_peak"] = _most_allocated(lambda: step(losses))
    return figures


def _most_allocated(step: Callable[[], None]) -> int:
    """The most bytes that a CPU's tensors take at a time during a step; files that are mapped are not counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()  # frees what was allocated before, which the profiler does not see
        with record_function("steady"):
            step()
    assert profiled.profiler is not None
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "steady")
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now) if event.start_ns() >= start else now
    plain = (found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter))  # others consist of these
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in plain)}
    return most - now + sum(storage.nbytes() for storage in storages.values() if storage.filename is None)


def alone(contender: Contender, workload: Workload, folder: Path) -> Figures | str:
    """What `measure` finds in a process of its own, or why it found nothing.

    `folder` is for the code that it compiles and whatever else it puts into a file.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-c", "from benchmarks import measurement; measurement.serve()"]
    files = {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    environment = {**os.environ, **files, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True
    ) as process:
        try:
            answer, _ = process.communicate(pickle.dumps((contender, workload)))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # and what it compiles with
            process.wait()
            raise
    return pickle.loads(answer) if answer else f"its process ended with status {process.returncode}"


def serve() -> None:
    """That process: answers on stdout with figures, or the line that says why there are none."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries say is no answer
        contender, workload = pickle.load(sys.stdin.buffer)
        torch.set_num_threads(workload.threads)
        try:
            answer: Figures | str = measure(contender, workload)
        except Exception as error:
            answer = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        pickle.dump(answer, answers)
