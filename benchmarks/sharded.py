"""A training step over several ranks, lowmem beside its peers in each placement: seconds, bytes moved, and memory.

    python benchmarks/sharded.py [--ranks 2 --layers 4 --hidden 384 --tokens 128 --batch 1] [--dtype float32]
                                 [--steps 5 --rounds 1] [--out benchmarks/results]

The ranks are processes of a gloo group on this machine's CPU, each with tokens of its own. `floor` is the ZeRO-3 model
whose gradients are dropped the moment they exist: what DeepSpeed's gathering costs. Seconds are the slowest rank's, to
be read as ratios to the floor, or to the peer in the same placement. What moves is weighed as it is handed to a
collective: the bytes that a rank sends if they go round in a ring, whatever gloo does with them.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # before torch and DeepSpeed look for others

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.baselines import Loss, Step, drop_gradients, fused, ordinary
from benchmarks.comparison import save
from lowmem import placements
from lowmem.placements import Ranks

Options = argparse.Namespace
Place = Callable[[Options], Any]  # a model, or what trains it, on the ranks
MOVED = {"gathers": "#b9d3f0", "gradients": "#4c72b0", "sums": "#dd8452"}  # what moves, and its colour
# Collectives by a part of their names: the argument that is whole, what it is, and how often a rank sends all but one
# rank's part of it in a ring.
COLLECTIVES = {"allgather": (0, "gathers", 1), "reduce_scatter": (1, "gradients", 1), "allreduce": (0, "gradients", 2)}


def whole(options: Options) -> Any:
    """Random weights, with activation checkpointing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def data_parallel(options: Options) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(whole(options), gradient_as_bucket_view=True)


def fsdp2(options: Options) -> torch.nn.Module:
    model, mesh = whole(options), init_device_mesh("cpu", (options.ranks,))
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    return model


def engine(options: Options, adamw: bool = True) -> Any:
    """DeepSpeed's, with the sizes of Hugging Face's `auto`; layers are released early, as where a model is large."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for half a minute
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    zero = {
        "stage": 3,
        "reduce_bucket_size": options.hidden**2,
        "stage3_prefetch_bucket_size": options.hidden**2 * 9 // 10,
        "stage3_param_persistence_threshold": options.hidden * 10,
        "stage3_max_reuse_distance": 0,
    }
    bf16 = {"enabled": options.dtype == "bfloat16"}
    config = {"train_micro_batch_size_per_gpu": options.batch, "bf16": bf16, "zero_optimization": zero}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = whole(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if adamw else None
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def zero3(options: Options) -> torch.nn.Module:
    return engine(options, adamw=False).module


def floor(model: torch.nn.Module) -> Step:
    drop = drop_gradients(model)

    def step(losses: Sequence[Loss]) -> None:
        drop(losses)
        for param in model.parameters():
            placements.release(param)  # as every step that changes it has to

    return step


def by_engine(engine: Any) -> Step:
    def step(losses: Sequence[Loss]) -> None:
        (loss,) = losses
        engine.backward(loss())
        engine.step()

    return step


ADALOMO = partial(fused, rule="adalomo", compile=True)
ADAMW = partial(fused, rule="adamw", compile=True)
FLOOR = "ZeRO-3, floor"
CONTENDERS: dict[str, tuple[Place, Callable[[Any], Step]]] = {
    FLOOR: (zero3, floor),
    "ZeRO-3, lowmem adalomo": (zero3, ADALOMO),
    "ZeRO-3, lowmem adamw": (zero3, ADAMW),
    "ZeRO-3, DeepSpeed's AdamW": (engine, by_engine),
    "FSDP2, lowmem adalomo": (fsdp2, ADALOMO),
    "FSDP2, lowmem adamw": (fsdp2, ADAMW),
    "FSDP2, AdamW(foreach=True)": (fsdp2, partial(ordinary, cls=torch.optim.AdamW, foreach=True)),
    "replicated, lowmem adalomo": (whole, ADALOMO),
    "replicated, DDP and AdamW": (data_parallel, partial(ordinary, cls=torch.optim.AdamW, fused=True)),
}
PEERS = {name.partition(",")[0]: name for name in CONTENDERS}  # the last of each placement


class Moved(TorchDispatchMode):
    """Weighs what is handed to collectives. `cut`: parameters are, and no gradient is reduced to all ranks."""

    def __init__(self, ranks: int, cut: bool) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._ranks, self._cut = ranks, cut

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and name == "broadcast_":
            self.bytes["sums"] += sum(tensor.nbytes for tensor in args[0])
        elif "c10d" in space:
            (kind,) = (kind for kind in COLLECTIVES if kind in name)  # raises where one would go uncounted
            which, what, times = COLLECTIVES[kind]
            tensors = tree_leaves(args[which])
            if kind == "allreduce" and (self._cut or not tensors[0].is_floating_point()):
                what = "sums"
            self.bytes[what] += times * sum(tensor.nbytes for tensor in tensors) * (self._ranks - 1) // self._ranks
        return func(*args, **(kwargs or {}))


def measure(name: str, options: Options, rank: int) -> dict[str, float]:
    """One contender, on this rank."""
    place, make = CONTENDERS[name]
    model = place(options)
    step = make(model)
    torch.manual_seed(rank)
    ids = torch.randint(0, 32000, (options.batch, options.tokens))
    tracker = MemTracker()

    def loss() -> torch.Tensor:
        tracker.reset_mod_stats()  # it cannot track a module's second forward otherwise
        return model(input_ids=ids, labels=ids).loss

    for _ in range(3):
        step([loss])
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak, which was that of making the model
    seconds = []
    for _ in range(options.steps):
        dist.barrier()
        start = time.perf_counter()
        step([loss])
        seconds.append(time.perf_counter() - start)
    (resident,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

    kinds = (torch.Tensor, torch.nn.Parameter, DTensor)  # and no fake ones, which compiling leaves behind
    tracker.track_external(*(found for found in gc.get_objects() if type(found) in kinds))
    with tracker:
        step([loss])
        step([loss])  # by now everything has been seen that lives between steps

    scatter_mean = Ranks.scatter_mean

    def as_on_nccl(self: Ranks, whole: torch.Tensor, size: int) -> torch.Tensor:
        self.reduces_copies = False  # what is asked of NCCL: gloo gets an all-reduce, since it would make one of it
        return scatter_mean(self, whole, size)

    moved = Moved(options.ranks, cut=place not in (whole, data_parallel))
    with mock.patch.object(Ranks, "scatter_mean", as_on_nccl), moved:
        step([loss])
    return {
        "seconds": statistics.median(seconds),
        **{what: moved.bytes[what] for what in MOVED},
        "tensor_peak": sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()),
        "resident": int(resident.split()[1]) * 1024,
        "weights": sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters()),
    }


def serve(rank: int, name: str, options: Options, store: str, answers: Any) -> None:
    """A rank, in a process of its own."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # DeepSpeed wants them set; the group is in the file
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    answers.put(measure(name, options, rank))
    dist.destroy_process_group()


def run(name: str, options: Options) -> dict[str, float]:
    """One contender; of each figure the rank's that has most."""
    answers = multiprocessing.get_context("forkserver").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (name, options, f"{folder}/store", answers)
        start_processes(serve, args, options.ranks, start_method="forkserver")
    ranks = [answers.get() for _ in range(options.ranks)]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def tell(results: dict[str, dict[str, float]], options: Options) -> None:
    """Prints the table."""
    columns, base = (*MOVED, "tensor_peak", "resident"), results[FLOOR]
    print(f"\n{'MiB a rank':28}{'s/step':>8}{'× floor':>9}{'× peer':>8}" + "".join(f"{key:>13}" for key in columns))
    for name, row in results.items():
        seconds, peer = row["seconds"], results[PEERS[name.partition(",")[0]]]
        cells = "".join(f"{row[key] / 2**20:13.{4 if key == 'sums' else 1}f}" for key in columns)
        print(f"{name:28}{seconds:8.3f}{seconds / base['seconds']:9.2f}{seconds / peer['seconds']:8.2f}{cells}")
    reduced = 2 * (1 - 1 / options.ranks) * base["weights"]
    gathered = reduced + base["gathers"]
    print(f"\nan all-reduce of every gradient: {reduced / 2**20:.1f} MiB")
    print(f"LOMO's way under ZeRO-3, which gathers as the floor and reduces so: {gathered / 2**20:.1f} MiB")


def draw(results: dict[str, dict[str, float]], options: Options) -> None:
    """Draws time, bytes moved and memory of each contender as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(results)[::-1]
    figure, panels = plt.subplots(1, 3, figsize=(13, 1.2 + 0.31 * len(names)), sharey=True, layout="constrained")
    looks = ["#e6e6e6" if name == FLOOR else "#2a8f7c" if "lowmem" in name else "#c9ced6" for name in names]
    drawn: tuple[tuple[str, dict[str, Any], float, str], ...] = (
        ("time of a step, × floor", {"seconds": looks}, results[FLOOR]["seconds"], "{:.2f}"),
        ("sent by a rank in a step, MiB", MOVED, 2**20, "{:.0f}"),
        ("most in tensors on a rank, MiB", {"tensor_peak": looks}, 2**20, "{:.0f}"),
    )
    for axes, (label, parts, unit, form) in zip(panels, drawn, strict=True):
        ends = [0.0] * len(names)
        for key, color in parts.items():
            values = [results[name][key] / unit for name in names]
            bars = axes.barh(names, values, left=ends, color=color, label=key)
            ends = [end + value for end, value in zip(ends, values, strict=True)]
        axes.bar_label(bars, [form.format(end) for end in ends], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].legend(fontsize=8, frameon=False)
    millions = results[FLOOR]["weights"] / getattr(torch, options.dtype).itemsize / 1e6
    shape = f"{options.batch} × {options.tokens} tokens a rank, {options.ranks} ranks on {os.cpu_count()} CPU cores"
    figure.suptitle(f"Llama of {millions:.0f}M parameters, {options.dtype}, checkpointing, {shape}")
    figure.savefig(options.out / "sharded.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    defaults = {"ranks": 2, "layers": 4, "hidden": 384, "tokens": 128, "batch": 1, "steps": 5, "rounds": 1}
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["__main__", "deepspeed"])  # imported once, for all ranks
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for turn in range(options.rounds):
        for name, rows in found.items():
            print(f"round {turn + 1}/{options.rounds}: {name}", file=sys.stderr)
            rows.append(run(name, options))
    results = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }
    tell(results, options)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out / "sharded.json", settings, results=results)
    draw(results, options)


if __name__ == "__main__":
    main()
