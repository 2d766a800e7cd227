"""Predicts the memory of a run: the trainer of the run takes one step with fake tensors.

The step uses the run's rule, policy, loss, checkpointing and placement, and the largest batch that the run can produce.
No memory for weights, states or activations is allocated, and the prediction does not depend on the machine.
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements import nbytes, shape_of, streaming_of
from lowmem.run import images
from lowmem.run.description import describe
from lowmem.run.fake import LONGEST, MICRO_BATCHES, offloaded_to_nvme, running
from lowmem.run.fake_ranks import fake_ranks
from lowmem.run.memory import BUFFERS, GRADIENTS, STATES, WEIGHTS, StepMemory
from lowmem.run.recipe import Recipe
from lowmem.step.room import HEADROOM
from lowmem.tiles.quantized import has_quantized_weights, is_quantized

# The device of fake tensors. A GPU is "meta", so that its tensors differ from those on the host.
DEVICES = {"gpu": torch.device("meta"), "cpu": torch.device("cpu")}

# Commands and arguments that cannot be planned: the reason and an alternative.
_BOUND = "sft with the same model and length of rows is a lower bound"
_NOT_PLANNED = {
    **dict.fromkeys(("grpo", "rloo"), f"its step also generates text. {_BOUND}"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "its kernels need data. Omit it for a bfloat16 base model"),
    "use_liger_kernel": "its kernels need data. Omit it to plan PyTorch's code, which needs more memory",
    "torch_compile": "a compiled model cannot run on fake tensors. Omit it to plan the eager model",
}

# Bytes per second of copies between host and device, in each direction: PCIe 4.0 with 16 lanes.
LINK = 26e9

# Memory outside tensors: the CUDA context and rounding by its allocator, or Python and its libraries.
RESERVE = {"gpu": 3 << 29, "cpu": 1 << 30}


class Phase(NamedTuple):
    """Peak bytes of a phase: on a rank's device, on its host (0 if that is the device), and on the shared disk."""

    device: int
    host: int = 0
    disk: int = 0


class RunPlan(NamedTuple):
    """The memory of a run."""

    step: StepMemory
    phases: dict[str, Phase]  # by name, in the order of a run
    summary: dict[str, str]  # topic → description
    reserve: int  # bytes that each device needs in addition to tensors

    @property
    def needed(self) -> int:
        """The bytes that the device of each rank must have."""
        return max(phase.device for phase in self.phases.values()) + self.reserve

    def figures(self) -> dict[str, Any]:
        phases = {name: phase._asdict() for name, phase in self.phases.items()}
        return {**self.summary, **self.step.figures(), "phases": phases, "reserve": self.reserve, "needed": self.needed}


def plan(recipe: Recipe, ranks: int = 1, memory: int | None = None) -> RunPlan:
    """Predicts the memory of a run of `ranks` processes, each with one of the recipe's devices. memory: the free bytes
    of a device; with `store: auto`, gradients use the remaining memory.

    Raises:
        ConfigError: the model's configuration cannot be read, or the arguments are not valid for training.
        UnsupportedError: the arguments cannot be planned.
    """
    _ = recipe.config  # raises first
    require_plannable(recipe, ranks)
    _ = recipe.optimizer  # raises before weights are fake
    device = DEVICES[recipe.device or "gpu"]
    on_gpu = device.type != "cpu"
    with fake_ranks(ranks, device, zero3=bool(recipe.training.deepspeed)) if ranks > 1 else nullcontext():
        recipe = recipe.with_values()  # parses its arguments again, for these ranks
        buffers = _disk_buffers(recipe)  # before `running`, which removes the disk from the options of DeepSpeed
        with running(recipe, device) as run:
            trainer = run.trainer
            step = run.step()
            summary = describe(trainer)
            if on_gpu and step.on_host[GRADIENTS] and trainer.optimizer.policy == "deferred":
                step, summary["gradients"] = _store(step, trainer.optimizer, memory)
            if on_gpu and (streaming := streaming_of(trainer.model)) is not None:
                summary["copies"] = _copies(step, streaming, trainer.args)
            summary["step"] = _batch_in_words(trainer, recipe.config)
            phases = _phases(trainer, step, ranks, converts=(recipe.config.dtype or recipe.dtype) != recipe.dtype)
    if buffers is not None:
        phases = _moved_to_disk(phases, step, ranks, buffers)
    return RunPlan(step, phases, summary, RESERVE[recipe.device or "gpu"])


def _batch_in_words(trainer: Any, config: Any) -> str:
    """Describes the micro-batches of a step, and the images in a row."""
    args = trainer.args
    micro = f"{args.gradient_accumulation_steps} micro-batches of " if args.gradient_accumulation_steps > 1 else ""
    shown = images.described(trainer.train_dataset[0]) if images.is_multimodal(config) else ""
    return f"{micro}{args.per_device_train_batch_size} x {args.max_length or LONGEST} tokens{shown}"


def _store(step: StepMemory, optimizer: Any, memory: int | None) -> tuple[StepMemory, str]:
    """Divides the stored gradients between a device with `memory` bytes and the host, and describes the division."""
    automatic = optimizer._parameters.config.store_bytes is None
    on_device = 0
    if automatic and memory is not None:
        on_device = min(step.on_host[GRADIENTS], max(0, int(memory * (1 - HEADROOM)) - step.peak))
    on_host = step.on_host[GRADIENTS] - on_device
    places = ((on_device, "device"), (on_host, "host"))
    text = " and ".join(f"{nbytes / 2**30:,.2f} GiB on the {place}" for nbytes, place in places if nbytes)
    text += " until the update"
    if automatic and memory is None:
        text += ", less if the device has room (--memory)"
    if on_host:
        text += f": {2 * on_host / LINK:,.1f} s of copies per micro-batch at {LINK / 1e9:.0f} GB/s"
    return replace(step, host_peak=step.host_peak - on_device), text


def _copies(step: StepMemory, streaming: Any, args: Any) -> str:
    """Describes the copies of a step, and the number of tokens per pass for which computation hides them."""
    width = sum(unit.nbytes for unit in streaming.units) / max(1, sum(param.numel() for param in streaming.owners))
    fetched, written, again = step.copied
    fetched += again * max(0, args.gradient_accumulation_steps - MICRO_BATCHES)  # the plan has no more
    seconds, tokens = max(fetched, written) / LINK, width * 100e12 / (2 * LINK)
    return (
        f"{fetched / 1e9:,.2f} GB to the device and {written / 1e9:,.2f} GB back in a step: {seconds:,.1f} s at "
        f"{LINK / 1e9:.0f} GB/s. They are hidden if a forward pass has {tokens:,.0f} tokens for each 100 TFLOP/s that "
        "the device reaches"
    )


def _disk_buffers(recipe: Recipe) -> int | None:
    """Returns the size in bytes of host buffers for copying weights on a disk, or None if no weights are on a disk."""
    if recipe.fused is not None and recipe.fused.home != "host":
        return 0
    if (options := offloaded_to_nvme(recipe.training)) is None:
        return None
    return options.get("buffer_count", 5) * options.get("buffer_size", 10**8) * recipe.dtype.itemsize


def _moved_to_disk(phases: dict[str, Phase], step: StepMemory, ranks: int, buffers: int) -> dict[str, Phase]:
    """Moves the weights and states on the host to the disk."""
    on_disk = {}
    for name, (device, host, disk) in phases.items():
        moved = step.on_host[WEIGHTS] + (0 if name == "load" else step.on_host[STATES])
        on_disk[name] = Phase(device, max(0, host - moved) + buffers, disk + ranks * moved)
    return on_disk


def _phases(trainer: Any, step: StepMemory, ranks: int, *, converts: bool) -> dict[str, Phase]:
    """Returns the phases of a run. Weights and states are loaded and saved one parameter at a time.

    phase         device                        host                      disk
    load          see `_load`
    step          its peak
    evaluation    its peak                      streamed weights, states
    save          between steps, and a weight   a weight, on its way      kept checkpoints and a new one
    resume        the larger of load and save                             kept checkpoints
    end           as save                                                 kept checkpoints and the model

    converts: the files have weights in another dtype.
    """
    args, sharded = trainer.args, trainer.optimizer.placement in ("zero3", "fsdp2")
    on_cpu = args.device.type == "cpu"
    weights = _weights(trainer.model)
    gathered = 0
    if sharded:
        gathered = max(weights) + max(weights) // ranks  # plus the padded shard
    elif has_quantized_weights(trainer.model):
        gathered = max(weights)
    states = (step.items[STATES] + step.on_host[STATES]) * (ranks if sharded else 1)
    # quantized weights are saved twice: rounded, as a model of transformers, and with the states of the optimizer
    codes = sum(nbytes(param) for param in trainer.model.parameters() if is_quantized(param))
    checkpoint = sum(weights) + (0 if args.save_only_model else states + codes)
    count = 0 if args.save_strategy == "no" else max(0, args.save_total_limit or 0) or _saves(args)
    load = _load(trainer, step, ranks, converts=converts)
    saved = Phase(step.rest + gathered, 0 if on_cpu else step.host_peak + max(weights))
    phases = {"load": load, "step": Phase(step.peak, step.host_peak)}
    if step.evaluation:
        phases["evaluation"] = Phase(step.evaluation, step.on_host[WEIGHTS] + step.on_host[STATES])
    if count:
        phases["save"] = saved._replace(disk=(count + 1) * checkpoint)
        phases["resume"] = Phase(max(load.device, saved.device), max(load.host, saved.host), count * checkpoint)
    phases["end"] = saved._replace(disk=count * checkpoint + sum(weights))
    return phases


def _load(trainer: Any, step: StepMemory, ranks: int, *, converts: bool) -> Phase:
    """Returns the memory of loading. On the host, weights that are not converted are pages of the mapped files."""
    placement = trainer.optimizer.placement
    on_cpu = trainer.args.device.type == "cpu"
    # extra, on_host: bytes in addition to the weights of the rank, on its device and on the host
    if placement == "fsdp2":
        extra, on_host = _load_by_rows(trainer, on_cpu, converts)
    elif placement == "zero3":
        unit = _largest_unit(trainer.model, placement)
        extra, on_host = (2 * unit if on_cpu else unit), 0  # it is gathered, by gloo into a copy
    else:
        extra = max(_weights(trainer.model)) if placement == "replicated" else 0
        on_host = _load_complete(trainer, step, ranks, on_cpu, converts)
    resident = step.items[WEIGHTS] + step.items[BUFFERS]
    if on_cpu:
        return Phase(max(resident + extra, on_host + (resident if placement == "fsdp2" else 0)))
    return Phase(resident + extra, step.on_host[WEIGHTS] + on_host)


def _load_by_rows(trainer: Any, on_cpu: bool, converts: bool) -> tuple[int, int]:
    """Returns the bytes in addition to a rank's shards under FSDP2: on its device, and on the host."""
    weights = _weights(trainer.model)
    complete = sum(weights) if converts else 0
    if trainer.args.fsdp_plugin_args["cpu_ram_efficient_loading"]:
        largest = max(weights)  # rank 0 broadcasts one weight after another
        return largest, complete + (largest if on_cpu else 0)
    if has_quantized_weights(trainer.model):
        complete = sum(map(nbytes, trainer.model.parameters()))
    return 0 if on_cpu else _largest_unit(trainer.model, "fsdp2"), complete  # a unit is moved to the GPU


def _load_complete(trainer: Any, step: StepMemory, ranks: int, on_cpu: bool, converts: bool) -> int:
    """Returns the bytes on the host of weights that are not sharded, in addition to weights that stay there."""
    weights, quantizes = _weights(trainer.model), has_quantized_weights(trainer.model)
    one_by_one = ranks == 1 and trainer.optimizer.placement != "streamed" and not (on_cpu or quantizes)  # to the GPU
    if converts and not one_by_one:
        # streamed weights get their home layer by layer
        return sum(weights) - (step.on_host[WEIGHTS] if trainer.fused.home == "host" else 0)
    return max(weights) if converts or quantizes else 0


def _weights(model: Any) -> list[int]:
    """Returns the bytes of each complete weight."""
    return [math.prod(shape_of(param)) * param.element_size() for param in model.parameters()]


def _saves(args: Any) -> int:
    """Returns the number of checkpoints of a run, or 1 if its arguments do not determine the number."""
    if args.save_strategy == "epoch":
        return math.ceil(args.num_train_epochs)
    if args.save_strategy == "steps" and args.save_steps < 1:
        return math.ceil(1 / args.save_steps)
    return max(1, math.ceil(args.max_steps / args.save_steps)) if args.save_strategy == "steps" else 1


def _largest_unit(model: Any, placement: str) -> int:
    """Returns the maximum bytes gathered at once: of an FSDP2 unit, or of a module without its submodules."""
    modules = (module for module in model.modules() if placement == "zero3" or isinstance(module, FSDPModule))
    owners = {param: module for module in modules for param in module.parameters()}  # the innermost ones
    sizes: Counter[Any] = Counter()
    for param, module in owners.items():
        sizes[module] += nbytes(param)
    return max(sizes.values(), default=0)


def require_plannable(recipe: Recipe, ranks: int = 1) -> None:
    """Raises `UnsupportedError` for a command, a device or an argument that a plan does not support, and `ConfigError`
    if there are too few ranks to shard the model.
    """
    parts = (recipe.training, recipe.model)
    given = {recipe.command, *(name for part in parts for name, value in vars(part).items() if value)}
    for name, reason in _NOT_PLANNED.items():
        if name in given:
            raise UnsupportedError(f"{name} cannot be planned: {reason}")
    sharded = next((name for name in ("deepspeed", "fsdp") if getattr(recipe.training, name)), None)
    if sharded and ranks < 2:
        raise ConfigError(f"{sharded} shards the model over several processes: set their number with --ranks N")
    if recipe.device == "cpu" and recipe.fused is not None and recipe.fused.home != "host":
        raise UnsupportedError("home: weights in files cannot be planned for a CPU. Plan them for a GPU (--device gpu)")
    if (getattr(recipe.training, "fsdp_plugin_args", None) or {}).get("cpu_offload"):
        raise UnsupportedError("fsdp_config.cpu_offload cannot be planned. Omit it to plan weights on the device")
    values = recipe.values
    autocast = values.get("fp16") or (recipe.dtype == torch.float32 and values.get("bf16") is not False)
    if recipe.device != "cpu" and autocast:
        raise UnsupportedError(
            "plans for a GPU do not support autocast. Set dtype: bfloat16, which also halves the memory, or bf16: "
            "false, or use --device cpu"
        )
