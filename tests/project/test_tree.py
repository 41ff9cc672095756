"""Which files the tests of this folder look at."""

import json
import shutil
import subprocess

import pytest
import test_tidy
import tree


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one tracked file, in which somebody has run `gradcast doctor`."""
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "tracked.py").write_text("x = 1\n")
    subprocess.run(["git", "add", "python"], cwd=tmp_path, check=True)
    (tmp_path / "gradcast-doctor").mkdir()
    (tmp_path / "gradcast-doctor" / "doctor.json").write_text(json.dumps({"script": "/ro" + "ot/train.py"}))
    (tmp_path / "python" / "notes.txt").write_text("untracked")
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    monkeypatch.setattr(test_tidy, "ROOT", tmp_path)
    tree.files.cache_clear()
    yield tmp_path
    tree.files.cache_clear()


def test_what_programs_leave_in_the_checkout_is_not_looked_at(checkout):
    assert tree.files() == (checkout / "python" / "tracked.py",)
    test_tidy.test_text_files_end_with_one_newline()
    test_tidy.test_no_text_has(test_tidy.MACHINE_PATH)


def test_without_git_the_folders_of_the_tree_are_looked_at(checkout, monkeypatch):
    for name in ("build", "__pycache__"):
        (checkout / "python" / name).mkdir()
        (checkout / "python" / name / "output.py").touch()
    (checkout / "Makefile").touch()
    (checkout / "plan.json").touch()
    monkeypatch.setenv("PATH", "")
    assert [str(path.relative_to(checkout)) for path in tree.files()] == [
        "Makefile", "python/notes.txt", "python/tracked.py",
    ]  # fmt: skip
    assert tree.files_in("python", ".py") == [checkout / "python" / "tracked.py"]


def test_a_tree_inside_of_another_repository(checkout, monkeypatch):
    inner = checkout / "unpacked"
    (inner / "docs").mkdir(parents=True)
    (inner / "docs" / "index.md").touch()
    monkeypatch.setattr(tree, "ROOT", inner)
    assert tree.files() == (inner / "docs" / "index.md",)


def test_no_tracked_file_is_overlooked_without_git():
    known = set(tree.tracked())
    if not known:
        pytest.skip("there is no git here")
    assert not known - set(tree.unpacked())
