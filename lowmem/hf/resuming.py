"""The position of a run in its training data. A resumed run continues with the next row, or raises an error.

transformers 5.23 (trainer.py) skips the number of steps of the checkpoint, even if a step now has other rows.
"""

import json
import logging
import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from datasets.fingerprint import Hasher
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from lowmem.errors import CheckpointError, DataError
from lowmem.files import read_json
from lowmem.hf import processes
from lowmem.hf.checkpoint import TRAINER_STATE_FILE

logger = logging.getLogger(__name__)

RECORD_FILE = "data.json"
_EPOCH = "epoch_"  # prefix of files with each rank's random states at the beginning of the epoch
_GENERATOR = "generator.pt"

# Arguments that determine the order of rows.
_ORDER = ("train_sampling_strategy", "data_seed", "seed", "dataloader_drop_last")
_SHAPE = "per_device_train_batch_size, gradient_accumulation_steps, processes"

# Maximum number of rows of a stream or a list, and of bytes of a data set, in a fingerprint.
_ROWS, _BYTES = 100, 4 << 30


class DataPosition(TrainerCallback):  # type: ignore[misc]
    """The position of a run in its training data.

    Args:
        loader: the training data, prepared by Accelerate.
        steps_per_epoch, max_steps: as counted by the trainer.
        checkpoint: the directory that the run resumes from, or None.

    Attributes:
        complete: whether no steps remain.
        start: the number of trained epochs, and the number of trained micro-batches in the next epoch.
        epoch: the number of epochs before the current one.
        fetched: the number of micro-batches that were fetched in the current epoch.
        ended: whether the current epoch has no more micro-batches.

    Raises:
        CheckpointError: the remaining steps would train on different rows.
        ConfigError: the ranks have different settings, or do not share a disk.
        DataError: the data differ from the data of the checkpoint.
    """

    def __init__(
        self, trainer: Any, loader: Any, steps_per_epoch: int, max_steps: int, checkpoint: Path | None
    ) -> None:
        args = trainer.args
        accumulation = args.gradient_accumulation_steps
        self._trainer = trainer
        self._loader = loader
        self._checkpoint = checkpoint
        self._data = getattr(loader, "dataset", loader)  # or a custom iterable of batches
        self._is_stream = isinstance(self._data, IterableDataset)
        self._batches = len(loader) if has_length(loader) else max_steps * accumulation  # per epoch, or in all steps
        self._rows_per_batch = trainer.get_total_train_batch_size(args) // accumulation  # of all ranks
        batch_sampler = getattr(loader, "batch_sampler", None)
        self._batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
        saves = args.save_strategy != "no"
        compared = saves or checkpoint is not None or args.world_size > 1
        self._record = self._describe(fingerprint(self._data) if compared else None)
        samples = len(trainer.train_dataset) if has_length(trainer.train_dataset) else None
        data = None if self._is_stream else self._record["data"]  # a stream may be split by rank
        processes.require_alike(args, trainer.fused, trainer.layers, samples, data, checkpoint)
        if saves:
            processes.require_shared_disk(Path(args.output_dir))
        self._random_states = TemporaryDirectory()  # of the beginning of this epoch
        step = 0 if checkpoint is None else read_json(checkpoint / TRAINER_STATE_FILE)["global_step"]
        self.complete = checkpoint is not None and step >= max_steps
        self.start = step // steps_per_epoch, 0
        if self.complete and trainer.is_world_process_zero():
            logger.warning(
                "training is already complete: %s is at step %d of %d, and its weights are loaded. Raise max_steps or "
                "num_train_epochs to continue.", checkpoint, step, max_steps
            )  # fmt: skip
        if checkpoint is not None and not self.complete and not args.ignore_data_skip:
            require_step_with_completions(args, step, checkpoint)
            saved = read_json(checkpoint / RECORD_FILE)
            require_same_rows(saved, self._record, checkpoint, steps=max_steps - step)
            self.start = saved["epoch"], saved["row"] // self._rows_per_batch
        self.epoch = self.start[0] - 1  # `on_epoch_begin` increments it
        self.fetched = 0
        self.ended = False

    def _describe(self, data_fingerprint: str | None) -> dict[str, Any]:
        """Returns the properties of the data, the order and the batches, which determine the rows of each step."""
        args, data = self._trainer.args, self._data
        sampler: Any = getattr(self._batch_sampler, "sampler", None)
        shape = [self._rows_per_batch // args.world_size, args.gradient_accumulation_steps, args.world_size]
        rows: Any = shape
        rows_per_epoch = 0
        # Accelerate's RandomSampler draws the order of an epoch from this seed and the number of the epoch
        seeded = type(sampler) is SequentialSampler or hasattr(sampler, "initial_seed")
        if seeded and not self._trainer.accelerator.split_batches:  # the order does not depend on the batches
            rows = math.prod(shape)
            rows_per_epoch = self._batches * self._rows_per_batch  # padded, or cut, to batches of all ranks
            if args.world_size == 1:
                rows_per_epoch = min(rows_per_epoch, len(data))
        return {name: getattr(args, name) for name in _ORDER} | {
            "data": data_fingerprint,
            "kind of data": type(data).__name__,
            "number of rows": len(data) if has_length(data) else None,
            "seed": None if seeded and args.data_seed is not None else args.seed,
            "dataloader_num_workers": args.dataloader_num_workers if self._is_stream else None,
            _SHAPE: shape,
            "rows": rows,
            "rows per epoch": rows_per_epoch,
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Corrects the path of the best checkpoint, because the run folder may have been moved or copied."""
        if self._checkpoint is not None:
            best = self._checkpoint.parent / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best) if best.is_dir() else None

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begins an epoch. For a resumed epoch, restores its random states, so that the same order is drawn."""
        self.epoch += 1
        self.fetched = 0
        self.ended = False
        start = Path(self._random_states.name)
        if self._checkpoint is not None and self.epoch == self.start[0]:
            self.fetched = self.start[1]
            for path in self._checkpoint.glob(f"{_EPOCH}*"):
                shutil.copy(path, start / path.name.removeprefix(_EPOCH))
            self._trainer._load_rng_state(str(start if self.fetched else self._checkpoint))
            if (start / _GENERATOR).exists():
                self._loader.synchronized_generator.set_state(torch.load(start / _GENERATOR, weights_only=True))
        if (set_epoch := getattr(self._batch_sampler, "set_epoch", None)) is not None:
            set_epoch(self.epoch)  # transformers does not do this if it skips batches
        self._note_random_states()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compares the weights of ranks in logged steps, because all ranks end these steps together."""
        if control.should_log:
            self._trainer.optimizer.compare_replicas()

    def _note_random_states(self) -> None:
        self._trainer._save_rng_state(self._random_states.name)
        if (generator := getattr(self._loader, "synchronized_generator", None)) is not None:
            torch.save(generator.get_state(), Path(self._random_states.name) / _GENERATOR)

    def save(self, folder: Path, epoch: float, *, write: bool) -> None:
        """Writes the random states and, if `write`, the position at the trainer's `epoch`. Every rank calls it."""
        assert self.epoch >= self.start[0]  # an epoch has begun
        batch = round((epoch - self.epoch) * self._batches)
        ended = batch == self.fetched if self.ended else batch == self._batches and not self._is_stream
        if ended:
            self._note_random_states()
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(self._random_states.name).iterdir():
            shutil.copy(path, folder / f"{_EPOCH}{path.name}")
        if write:
            position = {"epoch": self.epoch + ended, "row": 0 if ended else batch * self._rows_per_batch}
            (folder / RECORD_FILE).write_text(json.dumps(self._record | position))


def steps_with_completions(args: TrainingArguments) -> int:
    """Returns the number of steps of TRL's GRPO and RLOO that share completions."""
    micro_batches = getattr(args, "steps_per_generation", 1) * getattr(args, "num_iterations", 1)
    return math.lcm(micro_batches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps


def require_step_with_completions(args: TrainingArguments, step: int, checkpoint: Path) -> None:
    """Raises `CheckpointError` if the next step of TRL's GRPO or RLOO reuses completions of an earlier step."""
    every = steps_with_completions(args)
    if step % every:
        raise CheckpointError(
            f"{checkpoint} was saved between steps that share completions, which checkpoints do not store. Resume from "
            f"a step that is a multiple of {every}, and set save_steps to such a multiple"
        )


def require_same_rows(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path, steps: int) -> None:
    """Compares the record of a checkpoint with the record of a run that resumes from it. steps: the remaining steps.

    Raises:
        CheckpointError: the order or the batches differ.
        DataError: the data differ.
    """
    unknown = None in (saved["data"], now["data"])
    facts = ("number of rows", "kind of data") if unknown else ("number of rows", "data")
    if any(saved[name] != now[name] for name in facts):
        raise DataError(
            "the tokenized data differs from the data of this checkpoint. Restore the data and its settings "
            "(max_length, packing, the chat template) to continue the run, or start a new run from these weights: "
            "model_name_or_path=CHECKPOINT and another output_dir"
        )
    if unknown:
        logger.warning("only the number of rows of the data was compared with %s, not the rows themselves", checkpoint)
    # the padding of an epoch's last batch does not matter if the run ends before that batch
    per_step = math.prod(now[_SHAPE])
    epoch = min(saved["rows per epoch"], now["rows per epoch"])
    padding = ["rows per epoch"] if saved["row"] + steps * per_step > epoch // per_step * per_step else []
    names = [name for name in (*_ORDER, "dataloader_num_workers") if name in saved.keys() & now.keys()]
    values = [(name, saved[name], now[name]) for name in names]
    other_rows = any(saved[name] != now[name] for name in ("rows", *padding))
    if other_rows:
        shape = _SHAPE.replace("processes", "the number of processes").split(", ")
        values += zip(shape, saved[_SHAPE], now[_SHAPE], strict=True)
    changed = [
        f"{name} was {json.dumps(was)} and is now {json.dumps(value)}" for name, was, value in values if was != value
    ]
    if changed or other_rows:
        raise CheckpointError(
            f"{checkpoint} cannot be continued with the remaining rows: {', '.join(changed)}. Restore the previous "
            "values, or write ignore_data_skip: true to restart the epoch"
        )


def fingerprint(dataset: Any) -> str | None:
    """Returns a hash of the rows in order, which depends on their values and not on how `datasets` stores them.

    Above 4 GiB, it samples blocks of 1,000 rows. From a list, it samples 100 rows. From a stream of `datasets`, it
    reads the first 100 rows. Returns None for other data, because its rows may change whenever they are read.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return Hasher.hash(list(dataset.take(_ROWS)))
    if isinstance(dataset, list | tuple):
        return Hasher.hash([len(dataset), dataset[:: 1 + len(dataset) // _ROWS]])
    if not isinstance(dataset, datasets.Dataset):
        return None
    names = sorted({"input_ids", "labels", "seq_lengths"} & set(dataset.column_names)) or sorted(dataset.column_names)
    digest = xxhash.xxh3_128(" ".join(names).encode())
    rows = dataset.select_columns(names).with_format("arrow")
    for start in range(0, len(rows), 1000 * (1 + rows.data.nbytes // _BYTES)):
        batch = rows[start : start + 1000]
        for name in names:
            column = batch[name].combine_chunks()
            is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
            if is_list and pa.types.is_integer(column.type.value_type):
                digest.update(pc.list_value_length(column).to_numpy(zero_copy_only=False).astype("<i8").tobytes())
                digest.update(column.flatten().to_numpy(zero_copy_only=False).astype("<i8").tobytes())
            else:
                digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()
