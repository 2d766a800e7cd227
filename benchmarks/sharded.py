"""Measures the time, memory and sent bytes of a training step on several ranks with lowmem and its peers.

    python -m benchmarks.sharded [--ranks 2 --layers 4 --hidden 384 --tokens 128 --batch 1]

The ranks are processes of a gloo group on this machine's CPU, and train on different tokens. `floor` gathers ZeRO-3's
parameters and drops gradients in hooks, which is the cost of DeepSpeed alone. Times are measured on the slowest rank,
relative to the floor or to the peer in the same placement. The bytes that a rank sends are computed from the arguments
of each collective for a ring algorithm, even if gloo uses a different one.
"""

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # before torch and DeepSpeed look for accelerators

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import reports
from benchmarks.engine import reduce_scatter_as_nccl, shard_of
from benchmarks.measurement import llama, loss_of, peak_resident
from benchmarks.methods import Loss, Method, Step, drop_gradients, fused, ordinary
from benchmarks.pages import markdown
from benchmarks.processes import Figures, MeasurementError
from benchmarks.reports import command, ratio

Options = argparse.Namespace
SENT = ("gathers", "gradients", "sums")  # kinds of data that a rank sends
LLAMA = "transformers.models.llama.modeling_llama"
# Part of a collective's name → index of the argument with the full tensor, its kind, and how many times a rank in a
# ring sends all shards but one.
COLLECTIVES = {"allgather": (0, "gathers", 1), "reduce_scatter": (1, "gradients", 1), "allreduce": (0, "gradients", 2)}


def full_model(options: Options) -> Any:
    return llama(options.layers, options.hidden, options.hidden * 8 // 3, 32000, options.dtype)


def data_parallel(options: Options) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(full_model(options), gradient_as_bucket_view=True)


def fsdp2(options: Options) -> torch.nn.Module:
    model = full_model(options)
    mesh = init_device_mesh("cpu", (options.ranks,))
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    return model


def engine(options: Options, adamw: bool = True) -> Any:
    """Returns DeepSpeed's engine with Hugging Face's `auto` sizes. It releases layers early, as in a large model."""
    import deepspeed

    # DeepSpeed 0.19 (comm/torch.py, build_shm_op) would otherwise compile it, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    zero = {
        "stage": 3, "reduce_bucket_size": options.hidden**2, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": options.hidden**2 * 9 // 10,
        "stage3_param_persistence_threshold": options.hidden * 10,
    }  # fmt: skip
    bf16 = {"enabled": options.dtype == "bfloat16"}
    config = {"train_micro_batch_size_per_gpu": options.batch, "bf16": bf16, "zero_optimization": zero}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = full_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if adamw else None
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def zero3(options: Options) -> torch.nn.Module:
    return engine(options, adamw=False).module


def floor(model: torch.nn.Module) -> Step:
    drop = drop_gradients(model)

    def step(losses: Sequence[Loss]) -> None:
        drop(losses)
        for param in model.parameters():
            shard_of(param).release(param)  # as methods that update the parameter do

    return step


def by_engine(engine: Any) -> Step:
    def step(losses: Sequence[Loss]) -> None:
        (loss,) = losses
        engine.backward(loss())
        engine.step()

    return step


ADALOMO = partial(fused, rule="adalomo", compile=True)
ADAMW = partial(fused, rule="adamw", state_storage="float32", compile=True)
FLOOR = "ZeRO-3, floor"


@dataclass(frozen=True)
class RankMethod(Method):
    """A method of a training step on every rank. `place` creates the sharded model or DeepSpeed's engine."""

    place: Callable[[Options], Any] = full_model


METHODS = {
    FLOOR: RankMethod(floor, "floor", "deepspeed", place=zero3),
    "ZeRO-3, lowmem adalomo": RankMethod(ADALOMO, "lowmem", "deepspeed", place=zero3),
    "ZeRO-3, lowmem adamw": RankMethod(ADAMW, "lowmem", "deepspeed", place=zero3),
    "ZeRO-3, DeepSpeed's AdamW": RankMethod(by_engine, package="deepspeed", place=engine),
    "FSDP2, lowmem adalomo": RankMethod(ADALOMO, "lowmem", place=fsdp2),
    "FSDP2, lowmem adamw": RankMethod(ADAMW, "lowmem", place=fsdp2),
    "FSDP2, AdamW(foreach=True)": RankMethod(partial(ordinary, cls=torch.optim.AdamW, foreach=True), place=fsdp2),
    "replicated, lowmem adalomo": RankMethod(ADALOMO, "lowmem"),
    "replicated, DDP and AdamW": RankMethod(partial(ordinary, cls=torch.optim.AdamW, fused=True), place=data_parallel),
}
PEERS = {name.partition(",")[0]: name for name in METHODS}  # the last method in each placement


class SentBytes(TorchDispatchMode):
    """Counts the bytes that a rank sends in collectives.

    Args:
        ranks: number of ranks.
        sharded: whether parameters are sharded, so that gradients are not all-reduced.
    """

    def __init__(self, ranks: int, sharded: bool) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._ranks = ranks
        self._sharded = sharded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and name == "broadcast_":
            self.bytes["sums"] += sum(tensor.nbytes for tensor in args[0])
        elif "c10d" in space:
            (collective,) = (part for part in COLLECTIVES if part in name)  # raises an error for other collectives
            index, kind, times = COLLECTIVES[collective]
            tensors = tree_leaves(args[index])
            if collective == "allreduce" and (self._sharded or not tensors[0].is_floating_point()):
                kind = "sums"
            self.bytes[kind] += times * sum(tensor.nbytes for tensor in tensors) * (self._ranks - 1) // self._ranks
        return func(*args, **(kwargs or {}))


def measure(name: str, options: Options, rank: int) -> Figures:
    """Measures one method on this rank."""
    method = METHODS[name]
    model = method.place(options)
    step = method.make(model)
    torch.manual_seed(rank)
    compute = loss_of(model, torch.randint(0, 32000, (options.batch, options.tokens)))
    tracker = MemTracker()

    def loss() -> torch.Tensor:
        tracker.reset_mod_stats()  # otherwise MemTracker of torch 2.13 cannot track a second forward
        return compute()

    for _ in range(3):
        step([loss])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    times = []
    for _ in range(options.steps):
        dist.barrier()
        start = time.perf_counter()
        step([loss])
        times.append(time.perf_counter() - start)
    resident = peak_resident()

    kinds = (torch.Tensor, torch.nn.Parameter, DTensor)  # excludes fake tensors of compilation
    tracker.track_external(*(tensor for tensor in gc.get_objects() if type(tensor) in kinds))
    with tracker:
        step([loss])
        step([loss])  # the tracker has already seen all tensors that live between steps

    sent = SentBytes(options.ranks, sharded=method.place not in (full_model, data_parallel))
    with reduce_scatter_as_nccl(), sent:
        step([loss])
    return {
        "seconds": median(times),
        **{kind: sent.bytes[kind] for kind in SENT},
        "tensor_peak": sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()),
        "resident": resident,
        "weights": sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters()),
    }


def serve(rank: int, name: str, options: Options, store: str, answers: Any) -> None:
    """Measures one method on one rank, in a new process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # required by DeepSpeed, but unused
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    answers.put(measure(name, options, rank))
    dist.destroy_process_group()


def on_ranks(name: str, options: Options) -> Figures:
    """Measures one method, and returns the largest value of each figure over the ranks."""
    answers = multiprocessing.get_context("forkserver").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (name, options, f"{folder}/store", answers)
        try:
            start_processes(serve, args, options.ranks, start_method="forkserver")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise MeasurementError(str(error).strip().splitlines()[-1]) from error
    ranks = [answers.get() for _ in range(options.ranks)]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def tables(report: Any) -> dict[str, str]:
    """Returns a table with a row for each method."""
    results = report["results"]
    rows = []
    for name, row in results.items():
        sizes = {kind: f"{row[kind] / 2**20:.{4 if kind == 'sums' else 1}f}" for kind in SENT}
        peer = PEERS[name.partition(",")[0]]
        ratios = {"× floor": ratio(results, name, FLOOR), "× peer": ratio(results, name, peer)}
        memory = {"tensors, MiB": f"{row['tensor_peak'] / 2**20:.1f}", "process, MiB": f"{row['resident'] / 2**20:.1f}"}
        columns = {f"{kind}, MiB": text for kind, text in sizes.items()}
        rows.append({"per rank": name, "s/step": f"{row['seconds']:.3f}", **ratios, **columns, **memory})
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {
        "ranks": (2, "number of processes"), "layers": (4, "layers of the Llama"), "hidden": (384, "hidden size"),
        "tokens": (128, "tokens per row"), "batch": (1, "rows per rank"), "steps": (5, "timed steps per round"),
        "rounds": (1, "number of measurements of each method"),
    }  # fmt: skip
    options = reports.make_parser(__doc__, counts, only="method").parse_args(argv)
    # imported once for all ranks; this module is imported again in every rank
    multiprocessing.set_forkserver_preload(["deepspeed", "benchmarks.reports", "benchmarks.measurement", LLAMA])
    settings = {key: getattr(options, key) for key in (*counts, "dtype")}
    reports.compare(METHODS, options, "sharded", settings, tables, lambda name, _: on_ranks(name, options))


if __name__ == "__main__":
    main()
