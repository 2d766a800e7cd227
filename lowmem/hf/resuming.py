"""The rows of a run: a checkpoint says which are trained, and a resumed run continues with the next one or raises.

transformers 5.23 (trainer.py) skips as many steps as were taken, however many rows a step has now, and in what order.
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
import transformers
import xxhash
from datasets.fingerprint import Hasher
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from lowmem.errors import CheckpointError, DataError
from lowmem.files import read_json
from lowmem.hf.checkpoint import TRAINER_STATE_FILE

logger = logging.getLogger(__name__)

RECORD_FILE = "data.json"
_EPOCH = "epoch_"  # files with the random states at the beginning of the epoch, of each rank
_GENERATOR = "generator.pt"

# arguments that decide it; transformers 5 has the first one in place of the second
_ORDER = ("train_sampling_strategy", "group_by_length", "data_seed", "seed", "dataloader_drop_last")
_SHAPE = "per_device_train_batch_size, gradient_accumulation_steps, processes"

# Rows of a stream or a list, and bytes of a data set, that a fingerprint has.
_ROWS, _BYTES = 100, 4 << 30


class Rows(TrainerCallback):  # type: ignore[misc]
    """The rows of each step of a trainer, and where it is.

    Args:
        trainer: the trainer. Each rank has one.
        loader: its training data, prepared.
        steps_per_epoch, max_steps: as the trainer counts them.
        checkpoint: the directory from which it resumes, or None.

    Attributes:
        step: how many steps the checkpoint has trained.
        left: whether a step is left to train.
        start: numbers of epochs, and of micro-batches of the next epoch, that are trained.

    Raises:
        CheckpointError: the steps that are left would have other rows.
        DataError: the data are not those of the checkpoint.
    """

    def __init__(self, trainer: Any, loader: Any, steps_per_epoch: int, max_steps: int, checkpoint: str | None) -> None:
        args, data = trainer.args, getattr(loader, "dataset", loader)  # or batches of a class's own
        self._trainer, self._loader, self._max_steps = trainer, loader, max_steps
        accumulation = args.gradient_accumulation_steps
        # micro-batches per epoch; of a stream, those of all steps
        self._batches = batches = len(loader) if has_length(loader) else max_steps * accumulation
        compared = args.save_strategy != "no" or checkpoint is not None
        self._start = TemporaryDirectory()
        self._is_stream = isinstance(data, IterableDataset)
        self._per_step = trainer.get_total_train_batch_size(args)
        self._per_batch = self._per_step // args.gradient_accumulation_steps
        shape = [self._per_batch // args.world_size, args.gradient_accumulation_steps, args.world_size]
        rows, per_epoch = shape, 0
        sampler = getattr(loader, "batch_sampler", None)
        self._batch_sampler = getattr(sampler, "batch_sampler", sampler)
        self._sampler: Any = getattr(self._batch_sampler, "sampler", None)
        # Accelerate's RandomSampler draws the order of an epoch from this seed and the number of the epoch
        seeded = type(self._sampler) is SequentialSampler or hasattr(self._sampler, "initial_seed")
        if seeded and not trainer.accelerator.split_batches:  # whatever the batches are, the order is the same
            total = batches * self._per_batch  # padded, or cut, to batches of all ranks
            rows, per_epoch = self._per_step, min(total, len(data)) if args.world_size == 1 else total
        self._record = {name: getattr(args, name) for name in _ORDER if hasattr(args, name)} | {
            "data": fingerprint(data) if compared else None,
            "kind of data": type(data).__name__,
            "number of rows": len(data) if has_length(data) else None,
            "seed": None if seeded and args.data_seed is not None else args.seed,
            "dataloader_num_workers": args.dataloader_num_workers if self._is_stream else None,
            _SHAPE: shape,
            "rows": rows,
            "rows per epoch": per_epoch,
        }
        self._folder, self.step = None if checkpoint is None else Path(checkpoint), 0
        if self._folder is not None and (state := self._folder / TRAINER_STATE_FILE).is_file():
            self.step = read_json(state)["global_step"]
        self.left = self._folder is None or self.step < max_steps
        by_trainer = self.step // steps_per_epoch, self.step % steps_per_epoch * accumulation
        if args.ignore_data_skip:
            by_trainer = by_trainer[0], 0
        self.start = by_trainer
        if self._folder is not None and not args.ignore_data_skip:
            start = self._resume(self._folder)
            self.start = start if start is not None and self.left else by_trainer
        if self.start != by_trainer and not hasattr(Trainer, "_init_training_state"):
            raise CheckpointError(
                f"{checkpoint} has trained {self.start[0]} epochs and {self.start[1]} batches, and transformers "
                f"{transformers.__version__} would skip {by_trainer[0]} and {by_trainer[1]}. Run: pip install "
                "'transformers>=5.6'. Or write ignore_data_skip: true to begin the epoch again"
            )
        self.epoch = self.start[0] - 1  # begins with the next one

    def _resume(self, folder: Path) -> tuple[int, int] | None:
        """The start that a checkpoint says, or None if it does not."""
        args = self._trainer.args
        shared = getattr(args, "steps_per_generation", 1) * getattr(args, "num_iterations", 1)  # micro-batches, in TRL
        every = math.lcm(shared, args.gradient_accumulation_steps) // args.gradient_accumulation_steps
        if self.step % every and self.left:
            raise CheckpointError(
                f"{folder} was saved between steps that share completions, which checkpoints do not store. Resume from "
                f"a step that is a multiple of {every}, and set save_steps to such a multiple"
            )
        if not (folder / RECORD_FILE).exists():
            logger.warning(
                "%s has no %s, so lowmem cannot tell whether it was trained on the same rows", folder, RECORD_FILE
            )
            return None
        saved, now = read_json(folder / RECORD_FILE), self._record
        unknown = None in (saved["data"], now["data"])
        facts = ("number of rows", "kind of data") if unknown else ("number of rows", "data")
        if any(saved[name] != now[name] for name in facts):
            raise DataError(
                "the tokenized data differs from the data of this checkpoint. Restore the data and its settings "
                "(max_length, packing, the chat template) to continue the run, or start a new run from these weights: "
                "model_name_or_path=CHECKPOINT and another output_dir"
            )
        if unknown:
            logger.warning("only the number of rows of the data was compared with %s, not the rows themselves", folder)
        step = self._per_step
        end = saved["row"] + (self._max_steps - self.step) * step
        # a run that ends before the last batch of an epoch does not depend on how that is padded
        reached = end > min(saved["rows per epoch"], now["rows per epoch"]) // step * step
        for name in (*_ORDER, "dataloader_num_workers", "rows", *(["rows per epoch"] if reached else [])):
            if name in saved.keys() & now.keys() and saved[name] != now[name]:
                what = _SHAPE if name.startswith("rows") else name
                raise CheckpointError(
                    f"{folder} cannot be continued with the remaining rows: {what} was {saved[what]} and is now "
                    f"{now[what]}. Write {self._line(name, saved)}, or ignore_data_skip: true to restart the epoch"
                )
        return saved["epoch"], saved["row"] // self._per_batch

    def _line(self, name: str, saved: dict[str, Any]) -> str:
        """The line that gives the rows of a checkpoint."""
        if not name.startswith("rows"):
            return f"{name}: {json.dumps(saved[name])}"
        size, accumulation, ranks = saved[_SHAPE]
        step, now = size * accumulation * ranks, self._record[_SHAPE][2]
        if saved["rows per epoch"] == saved["number of rows"] and saved["number of rows"] % step == step % now == 0:
            ranks, size = now, math.gcd(step // now, size)
            accumulation = step // now // size
        line = f"per_device_train_batch_size: {size}, gradient_accumulation_steps: {accumulation}"
        return line + (f" (in {ranks} process{'es' * (ranks > 1)})" if ranks != now else "")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Corrects the path of the best checkpoint: the run folder may have been moved or copied since."""
        if self._folder is not None:
            best = self._folder.parent / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best) if best.is_dir() else None

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begins an epoch. One that is resumed gets the random states that it had, so that samplers and data sets draw
        the same order.
        """
        self.epoch, self.fetched, self.ended = self.epoch + 1, 0, False
        start = Path(self._start.name)
        if self._folder is not None and self.epoch == self.start[0]:
            self.fetched = self.start[1]
            for path in self._folder.glob(f"{_EPOCH}*"):
                shutil.copy(path, start / path.name.removeprefix(_EPOCH))
            self._trainer._load_rng_state(str(start if self.fetched else self._folder))
            if (start / _GENERATOR).exists():
                self._loader.synchronized_generator.set_state(torch.load(start / _GENERATOR, weights_only=True))
        if (set_epoch := getattr(self._batch_sampler, "set_epoch", None)) is not None:
            set_epoch(self.epoch)  # which transformers does not reach where batches are skipped
        if hasattr(self._sampler, "initial_seed"):
            # transformers 4 takes a resumed epoch from a new loader, which begins with epoch 0
            self._sampler.epoch, self._sampler.set_epoch = self.epoch, lambda epoch: None
        self._note_random_states()

    def _note_random_states(self) -> None:
        self._trainer._save_rng_state(self._start.name)
        if (generator := getattr(self._loader, "synchronized_generator", None)) is not None:
            torch.save(generator.get_state(), Path(self._start.name) / _GENERATOR)

    def save(self, folder: Path, epoch: float, *, write: bool) -> None:
        """Writes what a checkpoint says of its rows at an `epoch` of the trainer's state. Every rank calls it."""
        batch = round((epoch - self.epoch) * self._batches)
        ended = batch == self.fetched if self.ended else batch == self._batches and not self._is_stream
        if ended:
            self._note_random_states()
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(self._start.name).iterdir():
            shutil.copy(path, folder / f"{_EPOCH}{path.name}")
        if write:
            place = {"epoch": self.epoch + ended, "row": 0 if ended else batch * self._per_batch}
            (folder / RECORD_FILE).write_text(json.dumps(self._record | place))


def fingerprint(dataset: Any) -> str | None:
    """A hash of every row in order, which depends on what is trained on alone, and not on how `datasets` holds it.

    Beyond 4 GiB it has one block of 1,000 rows in so many, of a list 100 rows, and of a stream of `datasets` the first
    100. Returns None for other data, whose rows may differ each time they are read.
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
