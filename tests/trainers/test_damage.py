"""A checkpoint with any damage is named and passed over for the one before, and nothing in it is executed."""

import json
import os
import pickle
import shutil

import pytest
import torch
import xxhash
from builders import build

from lowmem.errors import CheckpointError
from lowmem.hf import checkpoint, integrity

NEWEST = "checkpoint-3"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run directory with three checkpoints."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    build("SFT", folder, True, save_strategy="steps", save_steps=1).train()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def overwrite(content):
    return lambda path: path.write_bytes(content)


def dump(value):
    return lambda path: torch.save(value, path)


def change(**values):
    def write(path):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | values))

    return write


def change_rng(**values):
    def write(path):
        torch.save(integrity.read_torch(path) | values, path)

    return write


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


HOW = {"cut": cut, "empty": overwrite(b""), "junk": overwrite(b"\x80\x02junk" * 9), "gone": os.unlink}
JSON = {"a list": overwrite(b"[1, 2]"), "deep": overwrite(b"[" * 100_000)}
PYTHON_STATE = (3, (1,) * 624 + (700,), None)
STATE, RNG = "trainer_state.json", "rng_state.pth"
DAMAGES = [
    *(
        (name, how)
        for name in ("model.safetensors", "optimizer.safetensors", "scheduler.pt", RNG)
        for how in HOW.items()
    ),
    *((name, how) for name in (STATE, "progress.json", "tokenizer.json") for how in (HOW | JSON).items()),
    *(
        (name, how)
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
        for how in (HOW | JSON).items()
        if how[0] != "gone"
    ),
    (STATE, ("another step", change(global_step=2))),
    (STATE, ("a step of text", change(global_step="3"))),
    (STATE, ("an unknown key", change(other=1))),
    (STATE, ("a history of numbers", change(log_history=[1]))),
    (STATE, ("no callbacks", change(stateful_callbacks=[]))),
    (
        STATE,
        ("a control of text", change(stateful_callbacks={"TrainerControl": {"args": {"x": "y"}, "attributes": {}}})),
    ),
    ("config.json", ("a link to itself", link_to_itself)),
    ("progress.json", ("no sums", change(loss_sums=[]))),
    ("progress.json", ("a sum of text", change(loss_sums=["1"]))),
    ("tokenizer.json", ("an empty mapping", overwrite(b"{}"))),
    ("chat_template.jinja", ("no text", overwrite(b"\xff\xfe\xfa"))),
    ("scheduler.pt", ("a list", dump([1]))),
    (RNG, ("a list", dump([1]))),
    (RNG, ("a short state", change_rng(cpu=torch.zeros(7, dtype=torch.uint8)))),
    (RNG, ("another generator", change_rng(python=PYTHON_STATE))),
    (RNG, ("past the end", change_rng(numpy=("MT19937", torch.ones(624, dtype=torch.int64).numpy(), 700, 0, 0.0)))),
    ("optimizer.safetensors", ("of a model", lambda path: shutil.copy(path.with_name("model.safetensors"), path))),
]


# What resuming does not read, and what says itself that it cannot be loaded, once the checksums accept it.
ACCEPTED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ACCEPTED |= {f"{RNG} a short state", f"{RNG} another generator", f"{STATE} a control of text"}
LISTED = {f"{name} {what}, listed": (name, damage, True) for name, (what, damage) in DAMAGES}
UNLISTED = {
    f"{name} {what}, accepted": (name, damage, False)
    for name, (what, damage) in DAMAGES
    if damage is link_to_itself or not {name, f"{name} {what}"} & ACCEPTED
}


@pytest.mark.parametrize(("name", "damage", "listed"), (LISTED | UNLISTED).values(), ids=LISTED | UNLISTED)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(run, name, damage, listed):
    """Also where the user has removed the file's line from the checksums."""
    if not listed:
        forget(run / NEWEST, name)
    damage(run / NEWEST / name)
    last, reasons = checkpoint.find_last(run)
    assert last == run / "checkpoint-2"
    assert len(reasons) == 1
    assert name in reasons[0] and NEWEST in reasons[0]
    assert len(reasons[0].replace(str(run), "")) < 400


@pytest.mark.parametrize("values", [{"cpu": torch.zeros(7, dtype=torch.uint8)}, {"python": PYTHON_STATE}])
def test_an_accepted_random_state_that_cannot_be_loaded_says_so(run, values):
    forget(run / NEWEST, RNG)
    change_rng(**values)(run / NEWEST / RNG)
    with pytest.raises(CheckpointError, match=f"{NEWEST}: its random state cannot be loaded"):
        build("SFT", run, True, max_steps=4).train(resume_from_checkpoint=True)


def forget(folder, name):
    path = folder / "checksums.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.endswith(f"  {name}\n")))


def test_a_flipped_bit_in_any_file_is_found(run):
    names = [path.name for path in (run / NEWEST).iterdir()]
    assert {"model.safetensors", "optimizer.safetensors", "config.json", RNG, STATE, "training_args.bin"} < {*names}
    for name in names:
        original = (run / NEWEST / name).read_bytes()
        flip(run / NEWEST / name)
        with pytest.raises(CheckpointError, match=NEWEST):
            checkpoint.check_resumable(run / NEWEST)
        if name != "trainer_state.json":
            with pytest.raises(CheckpointError, match=NEWEST):
                checkpoint.check_model(run / NEWEST)
        (run / NEWEST / name).write_bytes(original)
    checkpoint.check_resumable(run / NEWEST)


def test_a_file_that_was_changed_on_purpose_is_accepted_once_its_line_is_gone(run):
    path = run / NEWEST / "generation_config.json"
    change(temperature=0.5)(path)
    (run / NEWEST / "notes.txt").write_text("the best so far")  # not listed
    with pytest.raises(CheckpointError, match=r"generation_config.json is damaged.*on purpose, remove its line"):
        checkpoint.check_resumable(run / NEWEST)
    forget(run / NEWEST, path.name)
    checkpoint.check_resumable(run / NEWEST)


def test_the_lines_are_those_of_xxh128sum(tmp_path):
    """`printf '' | xxh128sum` prints this."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "a").write_bytes(b"")
    (tmp_path / "Z").write_bytes(b"text")
    integrity.write_checksums(tmp_path)
    assert (tmp_path / "checksums.txt").read_text() == (
        f"{xxhash.xxh3_128_hexdigest(b'text')}  Z\n99aa06d3014798d86001c324468d497f  adapter/a\n"
    )


LINES = {
    "": "it is empty",
    "junk\n": "line 1 is not a checksum and a name",
    f"{'0' * 32}  ../checkpoint-2/config.json\n": "outside of the checkpoint",
    f"{'0' * 32}  /etc/passwd\n": "outside of the checkpoint",
    f"{'0' * 32}  adapter/x\n": "adapter/x is missing",
}


@pytest.mark.parametrize(("text", "message"), LINES.items(), ids=LINES.values())
def test_damaged_checksums_are_refused(run, text, message):
    (run / NEWEST / "checksums.txt").write_text(text)
    for check in (checkpoint.check_resumable, checkpoint.check_model):
        with pytest.raises(CheckpointError, match=message):
            check(run / NEWEST)


def test_only_resuming_needs_checksums(run):
    (run / NEWEST / "checksums.txt").unlink()
    checkpoint.check_model(run / NEWEST)
    with pytest.raises(CheckpointError, match="not written completely, or by another program"):
        checkpoint.check_resumable(run / NEWEST)


INDICES = {
    "up": ({"weight_map": {"w": "../checkpoint-2/model.safetensors"}}, "is not a file of the same folder"),
    "absolute": ({"weight_map": {"w": "/etc/passwd"}}, "is not a file of the same folder"),
    "a number": ({"weight_map": {"w": 3}}, "is not a file of the same folder"),
    "the folder": ({"weight_map": {"w": "."}}, "is not a file of the same folder"),
    "a list": ([], "is not a mapping"),
    "no map": ({}, "has no weight_map"),
    "an empty map": ({"weight_map": {}}, "has no weight_map"),
    "a map of text": ({"weight_map": "model.safetensors"}, "has no weight_map"),
}


@pytest.mark.parametrize(("index", "message"), INDICES.values(), ids=INDICES)
def test_an_index_leads_nowhere_else(run, index, message):
    (run / NEWEST / "model.safetensors.index.json").write_text(json.dumps(index))
    for check in (checkpoint.check_resumable, checkpoint.check_model):
        with pytest.raises(CheckpointError, match=message):
            check(run / NEWEST)
    assert checkpoint.find_last(run)[0] == run / "checkpoint-2"


def test_a_link_out_of_the_checkpoint_is_refused(run):
    path = run / NEWEST / "model.safetensors"
    path.unlink()
    path.symlink_to(run / "checkpoint-2" / "model.safetensors")
    forget(run / NEWEST, path.name)
    with pytest.raises(CheckpointError, match=r"model.safetensors is a link out of the checkpoint"):
        checkpoint.check_resumable(run / NEWEST)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize(
    "name",
    [
        RNG, "rng_state_0.pth", "scheduler.pt", "scaler.pt", "training_args.bin", "optimizer.pt", "pytorch_model.bin",
        "adapter_model.bin", "model.safetensors", "optimizer.safetensors", STATE, "config.json", "tokenizer.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_nothing_is_unpickled(run, name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forget(run / NEWEST, name)
    with (run / NEWEST / name).open("wb") as file:
        write(Bomb(), file)
    folder, reasons = checkpoint.find_last(run)
    assert folder == run / NEWEST or name in reasons[0]
    build("SFT", run, True, max_steps=4).train(resume_from_checkpoint=True)
    assert not (tmp_path / "exploded").exists()
