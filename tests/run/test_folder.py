"""A run folder can be used by one run at a time, can be moved, and is never confused with another folder."""

import pytest
from support.runs import in_use

from lowmem.errors import ConfigError, LowmemError
from lowmem.run.folder import RunFolder


def use(folder, resume=None):
    with RunFolder(folder, resume).opened():
        (folder / "config.yaml").touch()


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    with in_use(tmp_path):
        for resume in ("last", None):
            with pytest.raises(ConfigError, match="is in use by another run"):
                use(tmp_path, resume)
    use(tmp_path)  # a killed process does not hold the lock
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("files", "resume", "message"),
    [
        ([], "last", "has no run to resume. Omit --resume_from_checkpoint"),
        (["notes.txt"], "last", "has no run to resume"),
        (["notes.txt"], None, "is not empty (it contains notes.txt). Set output_dir to another folder"),
        (["config.yaml"], None, "Continue it with --resume_from_checkpoint last"),
        (["checkpoint-4/config.json"], None, "already contains a run. Continue it with --resume_from_checkpoint last"),
    ],
)
def test_an_existing_run_folder_must_match_the_command(tmp_path, files, resume, message):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        use(tmp_path, resume)
    assert message in str(refused.value)
    assert [path.name for path in tmp_path.glob("*")] == [name.split("/")[0] for name in files]


def test_a_failed_run_removes_its_new_folder_on_rank_0_only(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        (tmp_path / "run").mkdir(exist_ok=True)
        with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "run").opened():
            _ = 1 / 0
        assert (tmp_path / "run").exists() == (rank == 1)


def test_a_failed_run_removes_its_files_if_it_had_not_started_training(tmp_path):
    def fail(begin):
        folder = tmp_path / "run"
        with pytest.raises(ZeroDivisionError), RunFolder(folder).opened():
            (folder / "metrics.jsonl").touch()
            (folder / "runs" / "tracker").mkdir(parents=True)
            (folder / "traceback.txt").touch()
            if begin:
                (folder / "config.yaml").touch()
            _ = 1 / 0
        return {path.name for path in folder.iterdir()}

    assert fail(begin=False) == fail(begin=False) == {"traceback.txt"}  # a run has other files
    assert fail(begin=True) == {"traceback.txt", "metrics.jsonl", "runs", "config.yaml"}


def test_a_failed_run_keeps_existing_files(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path, "other/checkpoint-4").opened():
        (tmp_path / "metrics.jsonl").touch()
        _ = 1 / 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_lock_of_a_killed_run_is_ignored(tmp_path):
    for name in ("metrics.jsonl", ".rank-0", "runs"):  # left by a run that was killed in its first step
        (tmp_path / name).touch()
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    use(tmp_path)


def test_an_invalid_output_directory_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LowmemError, match="cannot be written: file exists"):
        use(tmp_path / "file")
    with pytest.raises(LowmemError, match="cannot be written: not a directory"):
        use(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="has no run to resume"):
        use(tmp_path / "none", resume="last")
    assert not (tmp_path / "none").exists()
