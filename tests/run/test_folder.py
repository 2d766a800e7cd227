"""The run folder: one run at a time, continued where it lies, and never mistaken for another."""

import pytest
from runs import in_use

from lowmem.errors import ConfigError
from lowmem.run.folder import run_folder


def use(folder, resume=False):
    with run_folder(folder, resume) as path:
        (path / "config.yaml").touch()


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    with in_use(tmp_path) as other:
        for resume in (True, False):
            with pytest.raises(ConfigError, match=f"is in use by process {other} on "):
                use(tmp_path, resume)
    use(tmp_path)  # a killed process holds nothing
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("files", "resume", "message"),
    [
        ([], True, "does not contain a run to resume. Omit --resume"),
        (["notes.txt"], True, "does not contain a run to resume"),
        (["notes.txt"], False, "is not empty (it has notes.txt). Set run_dir to another folder"),
        (["config.yaml"], False, "already contains a run. Continue it with --resume"),
        (["checkpoint-4/config.json"], False, "already contains a run. Continue it with --resume"),
    ],
)
def test_what_a_folder_has_must_fit(tmp_path, files, resume, message):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        use(tmp_path, resume)
    assert message in str(refused.value)
    assert [path.name for path in tmp_path.glob("*")] == [name.split("/")[0] for name in files]


def test_a_folder_that_was_made_for_a_failed_run_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), run_folder(tmp_path / "new", resume=False):
        _ = 1 / 0
    assert not (tmp_path / "new").exists()


def test_a_lock_of_a_killed_run_is_no_run(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    use(tmp_path)


def test_a_file_and_a_missing_folder_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        use(tmp_path / "file")
    with pytest.raises(ConfigError, match="does not contain a run"):
        use(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
