"""Measures the time and memory of a Llama's training step in this process.

On a GPU, the peak of tensors is the allocator's maximum of allocated bytes. On a CPU, the profiler counts allocations.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.methods import Method
from benchmarks.processes import Figures


def llama(
    layers: int, hidden: int, intermediate: int, vocabulary: int, dtype: str, device: str | torch.device = "cpu",
    *, checkpointing: bool = True, seed: int = 0, **config: Any,
) -> Any:  # fmt: skip
    """Returns a Llama in training mode, by default with activation checkpointing and attention heads of 64 elements.

    Args:
        config: additional arguments of `LlamaConfig`.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    options = {"num_hidden_layers": layers, "num_attention_heads": hidden // 64, "use_cache": False, **config}
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **options), dtype=getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Returns a function that computes the language-model loss of token ids of shape [rows, tokens]."""
    return lambda: model(input_ids=ids, labels=ids).loss


# Approximate number of parameters → layers, hidden size and vocabulary of a Llama.
SIZES = {"1M": (3, 128, 1024), "10M": (7, 256, 8192), "100M": (8, 768, 32000), "1B": (17, 2048, 32000)}


@dataclass(frozen=True)
class Workload:
    """Training of a Llama of one of the `SIZES` on `batch` rows of `tokens` tokens, with `steps` timed steps."""

    size: str
    batch: int
    tokens: int
    dtype: Literal["bfloat16", "float32"]
    steps: int
    threads: int = field(default_factory=torch.get_num_threads)

    def settings(self) -> dict[str, Any]:
        """Returns the fields, the number of parameters, and the bytes of the weights."""
        parameters = sum(param.numel() for param in self.model("meta").parameters())
        weights = parameters * getattr(torch, self.dtype).itemsize
        return {**asdict(self), "parameters": parameters, "weights": weights}

    def model(self, device: str) -> nn.Module:
        """Returns a model with random weights and activation checkpointing."""
        layers, hidden, vocabulary = SIZES[self.size]
        intermediate = -(-hidden * 8 // 3 // 256) * 256  # as in Llama, rounded up to a multiple of 256
        return llama(layers, hidden, intermediate, vocabulary, self.dtype, device)


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """Returns the duration of a call, including all work that it launches on a GPU."""
    sync()
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


def measure(method: Method, workload: Workload) -> Figures:
    """Measures the training steps of one method.

    Returns:
        `seconds` per step, seconds of the `first_step`, and the bytes of `tensor_peak` and `process_peak`.
    """
    torch.set_num_threads(workload.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = workload.model(device)
    take = method.make(model)
    rows = torch.randint(SIZES[workload.size][-1], (workload.batch, workload.tokens), device=device)
    losses = [loss_of(model, ids) for ids in rows.tensor_split(method.micro_batches)]

    def step() -> None:
        take(losses)

    first, _, *times = (seconds(step) for _ in range(workload.steps + 2))
    figures = {"seconds": statistics.median(times), "first_step": first, "process_peak": peak_resident()}
    gc.collect()  # compilation leaves reference cycles with a gradient
    if device == "cpu":
        return {**figures, "tensor_peak": peak_of_tensors(step)}
    torch.cuda.reset_peak_memory_stats()
    step()
    return {**figures, "tensor_peak": torch.cuda.max_memory_allocated()}


def peak_resident() -> int:
    """Returns the peak resident bytes of this process. (`ru_maxrss` would include the parent process's peak.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _events(run: Callable[[], object]) -> list[Any]:
    """Returns the profiler's events of a call in order of time. `[memory]` events that free have `nbytes` < 0."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    return sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())


def peak_of_temporaries(run: Callable[[], object]) -> int:
    """Returns the peak of the CPU bytes that a call allocates."""
    now = peak = 0
    for event in _events(run):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def peak_of_tensors(step: Callable[[], object]) -> int:
    """Returns the peak bytes of all CPU tensors during a step."""

    def steps() -> None:
        step()  # frees memory that was allocated before profiling, which the profiler does not see
        with record_function("steady"):
            step()

    events = _events(steps)
    start = next(event.start_ns() for event in events if event.name() == "steady")
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now) if event.start_ns() >= start else now
    # tensor subclasses consist of plain tensors
    plain = (tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter))
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in plain)}
    return peak - now + sum(storage.nbytes() for storage in storages.values())
