"""A damaged checkpoint is reported and skipped in favor of the previous one, and nothing in it is executed."""

import json
import logging
import os
import pickle
import shutil

import pytest
import torch
import xxhash
from support.products import in_turn
from support.trainers import build, joined

from lowmem.errors import CheckpointError
from lowmem.hf import checkpoint, checksums
from lowmem.run import generation

NEWEST = "checkpoint-3"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns a run directory with three checkpoints."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    build("SFT", folder, True, save_strategy="steps", save_steps=1).train()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def overwrite(content):
    return lambda path: path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    # damages the middle, or in checksums the model's line
    place = content.find(b"model.safetensors") if path.name == "checksums.txt" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


HOW = {"cut": cut, "empty": overwrite(b""), "junk": overwrite(b"\x80\x02junk" * 9), "gone": os.unlink}
HOW |= {"a link to itself": link_to_itself}
NAMES = ["model.safetensors", "optimizer.safetensors", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
NAMES += ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(("name", "damage"), in_turn(NAMES, HOW.values()))
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(run, name, damage):
    damage(run / NEWEST / name)
    last, (reason,) = checkpoint.find_last(run)
    assert last == run / "checkpoint-2"
    assert name in reason and NEWEST in reason
    assert len(reason.replace(str(run), "")) < 400


def test_a_flipped_bit_in_any_file_is_found(run):
    names = {path.name for path in (run / NEWEST).iterdir()}
    assert {*NAMES, "training_args.bin", "checksums.txt"} < names
    for name in names:
        original = (run / NEWEST / name).read_bytes()
        flip(run / NEWEST / name)
        with pytest.raises(CheckpointError, match=NEWEST):
            checkpoint.check_resumable(run / NEWEST)
        if name != checkpoint.OPTIMIZER_FILE:
            with pytest.raises(CheckpointError, match=NEWEST):
                generation.check_model(run / NEWEST)
        (run / NEWEST / name).write_bytes(original)
    checkpoint.check_resumable(run / NEWEST)


def test_a_model_is_checked_without_the_file_of_the_optimizer(run, monkeypatch):
    """The optimizer's file is as large as the weights or larger, and generation does not need it."""
    read = []
    monkeypatch.setattr(checksums, "checksum", lambda path: read.append(path.name))
    (run / NEWEST / "checksums.txt").write_text(f"{'0' * 32}  optimizer.safetensors\n")
    generation.check_model(run / NEWEST)
    assert read == []


@pytest.mark.parametrize("newest", ["intact", "damaged"])
def test_one_rank_looks_for_the_checkpoint_once(two, newest, run):
    if newest == "damaged":
        flip(run / NEWEST / "model.safetensors")
    (path, read, warned), (other, unread, silent) = two.run(looked_for, True, str(run))
    assert path == other == str(run / (NEWEST if newest == "intact" else "checkpoint-2"))
    assert len(set(read)) == len(read) > 0
    assert unread == silent == []
    assert len(warned) == (newest == "damaged")


def test_every_rank_raises_the_error_of_rank_0(two, run):
    flip(run / NEWEST / "model.safetensors")
    for message, *_ in two.run(looked_for, str(run / NEWEST), str(run)):
        assert "model.safetensors is damaged: its checksum differs from the one in" in message


def looked_for(rank, requested, folder):
    """Returns the checkpoint or the error, the files that were read, and the warnings."""
    read, compute, logged = [], checksums.checksum, []
    checksums.checksum = lambda path: read.append(path) or compute(path)
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger("lowmem").addHandler(handler)
    trained = []
    try:
        with joined(rank):
            trainer = build("SFT", folder, True, max_steps=3, use_cpu=True, per_device_train_batch_size=1)
            trainer._load_from_checkpoint = lambda path, model=None: trained.append(path)
            trainer._load_optimizer_and_scheduler = lambda path: None
            trainer.train(resume_from_checkpoint=requested)
    except CheckpointError as error:
        trained = [str(error)]
    finally:
        checksums.checksum = compute
        logging.getLogger("lowmem").removeHandler(handler)
    return trained[0], read, [record.getMessage() for record in logged if "damaged" in record.getMessage()]


def forget(folder, name):
    path = folder / "checksums.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.endswith(f"  {name}\n")))


def test_removing_a_checksum_line_accepts_a_changed_file(run):
    path = run / NEWEST / "generation_config.json"
    path.write_text('{"temperature": 0.5}')
    (run / NEWEST / "notes.txt").write_text("the best so far")  # not listed
    with pytest.raises(CheckpointError, match=r"generation_config.json is damaged.*on purpose, remove its line"):
        checkpoint.check_resumable(run / NEWEST)
    forget(run / NEWEST, path.name)
    checkpoint.check_resumable(run / NEWEST)


def test_checksums_have_the_format_of_xxh128sum(tmp_path):
    """`printf '' | xxh128sum` prints this line."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "a").write_bytes(b"")
    (tmp_path / "Z").write_bytes(b"text")
    checksums.write(tmp_path)
    assert (tmp_path / "checksums.txt").read_text() == (
        f"{xxhash.xxh3_128_hexdigest(b'text')}  Z\n99aa06d3014798d86001c324468d497f  adapter/a\n"
    )


LINES = {
    "": "it is empty",
    "junk\n": "line 1 is not a checksum and a name",
    f"{'0' * 32}  ../checkpoint-2/config.json\n": "outside the checkpoint",
    f"{'0' * 32}  adapter/x\n": "adapter/x is missing",
}


@pytest.mark.parametrize(("text", "message"), LINES.items(), ids=LINES.values())
def test_damaged_checksums_raise(run, text, message):
    (run / NEWEST / "checksums.txt").write_text(text)
    for check in (checkpoint.check_resumable, generation.check_model):
        with pytest.raises(CheckpointError, match=message):
            check(run / NEWEST)


def test_only_resuming_needs_checksums(run):
    (run / NEWEST / "checksums.txt").unlink()
    generation.check_model(run / NEWEST)
    with pytest.raises(CheckpointError, match="is incomplete or was written by another program"):
        checkpoint.check_resumable(run / NEWEST)
    cut(run / NEWEST / "model.safetensors")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        generation.check_model(run / NEWEST)


@pytest.mark.parametrize("map", [{"w": "../checkpoint-2/model.safetensors"}, {"w": 3}, {}])
def test_an_index_cannot_name_files_outside_its_folder(run, map):
    (run / NEWEST / "checksums.txt").unlink()
    (run / NEWEST / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map}))
    with pytest.raises(CheckpointError, match=r"not a file of the same folder|has no weight_map"):
        generation.check_model(run / NEWEST)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


PICKLED = ["rng_state.pth", "scheduler.pt", "scaler.pt", "training_args.bin", "optimizer.pt"]


@pytest.mark.parametrize(("name", "write"), in_turn(PICKLED, [pickle.dump, torch.save]))
def test_nothing_is_unpickled(run, name, write, tmp_path, monkeypatch):
    """This includes a file that the checksums do not list."""
    monkeypatch.chdir(tmp_path)
    forget(run / NEWEST, name)
    with (run / NEWEST / name).open("wb") as file:
        write(Bomb(), file)
    trainer = build("SFT", run, True, max_steps=4)
    if name in ("rng_state.pth", "scheduler.pt"):
        with pytest.raises(pickle.UnpicklingError):
            trainer.train(resume_from_checkpoint=True)
    else:
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / "exploded").exists()
