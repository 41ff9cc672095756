"""Files are written completely or not at all, and what is no ordinary file stays what it is."""

import errno
import importlib.util
import json
import os
import resource
import stat
import subprocess
import sys
import threading

import pytest

from conftest import NETWORK
from diagnosis import doctor_runs
from gradcast import disk
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.trace import files as trace_files
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.errors import Error

OLD = "what was there before"
DRAWS = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="this draws pictures")


@pytest.fixture
def full_disk():
    """No file becomes longer than ten bytes. A tmpfs would need root, see test_on_a_disk_that_is_full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "doctor.json").write_text(json.dumps(doctor_runs.doctor()))
    trace_files.save(merged_trace.merge(doctor_runs.rank_traces(1, 2)), folder / "trace.json.gz")
    return folder


WRITERS = {
    "dev plan": ["dev", "plan", "vgg16", *NETWORK, "-o", "@"],
    "dev profile import": ["dev", "profile", "import", "layers.csv", "-o", "@"],
    "dev link fit": ["dev", "link", "fit", "samples.csv", "-o", "@"],
    "simulate --csv": ["simulate", "vgg16", *NETWORK, "--policy", "ddp", "--csv", "@"],
    "report": ["report", "run", "-o", "@"],
    "simulate --plot": ["simulate", "vgg16", *NETWORK, "--policy", "ddp", "--plot", "@"],
}


@pytest.mark.parametrize("name", [*(pytest.param(each, marks=DRAWS) if "plot" in each else each for each in WRITERS)])
def test_where_writing_fails_the_old_file_stays(name, run, run_folder, tmp_path, full_disk, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.csv").write_text("layer,forward_ms,backward_ms,parameter_bytes\nconv,1,2,400\n")
    (tmp_path / "samples.csv").write_text("bytes,time_ns\n" + "".join(f"{4**k},{10**5 + 4**k}\n" for k in range(3, 9)))
    (tmp_path / "old.png").write_text(OLD)
    before = sorted(os.listdir(tmp_path))
    full_disk()
    result = run(*("old.png" if part == "@" else part for part in WRITERS[name]))
    assert result.code == 3
    assert "cannot be written to old.png: file too large" in result.err
    assert (tmp_path / "old.png").read_text() == OLD
    assert sorted(os.listdir(tmp_path)) == before


def test_a_diagnosis_that_cannot_be_written_leaves_the_one_before(run_folder, full_disk, capsys):
    before = {path.name: path.read_bytes() for path in run_folder.iterdir()}
    full_disk()
    with pytest.raises(Error, match=r"the result cannot be written to .*doctor\.json: file too large"):
        Outcome(str(run_folder), rank=0).save(doctor_runs.doctor(), None)
    assert {path.name: path.read_bytes() for path in run_folder.iterdir()} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_on_a_disk_that_is_full(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        disk.write_file(tmp_path / "plan.json", OLD, "plan")
        with pytest.raises(Error, match=r"plan\.json: no space left on device"):
            disk.write_file(tmp_path / "plan.json", bytes(1 << 20), "plan")
        assert (tmp_path / "plan.json").read_text() == OLD
        assert os.listdir(tmp_path) == ["plan.json"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_nothing_is_left_of_a_write_that_is_interrupted(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    disk.write_file(tmp_path / "plan.json", OLD, "plan")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk.write_file(tmp_path / "plan.json", "new", "plan")
    assert (tmp_path / "plan.json").read_text() == OLD
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_of_the_umask(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        disk.write_file(tmp_path / "new", "text", "plan")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    path = tmp_path / "old"
    path.write_text(OLD)
    path.chmod(0o640)
    disk.write_file(path, "new", "plan")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_that_is_replaced_keeps_its_owner(tmp_path):
    path = tmp_path / "old"
    path.write_text(OLD)
    os.chown(path, 1234, 2345)
    disk.write_file(path, "new", "plan")
    assert (path.read_text(), path.stat().st_uid, path.stat().st_gid) == ("new", 1234, 2345)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "target"
    link.symlink_to("there/target")
    for text in ("first", "second"):  # a link to nothing at first
        disk.write_file(link, text, "plan")
        assert (link.is_symlink(), target.read_text()) == (True, text)
    assert os.listdir(tmp_path / "there") == ["target"]


def test_a_pipe_stays_a_pipe(tmp_path):
    """As does a device: as root, a file in the place of /dev/null would break every program of the machine."""
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    with pytest.raises(Error, match="cannot be written to"):  # nobody reads from it
        disk.write_file(path, "text", "page")
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    while not found:
        try:
            disk.write_file(path, "text", "page")
            break
        except Error:  # the reader has not opened it yet
            continue
    reader.join(30)
    assert found == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)
    disk.check_writable(path, "page")


def test_the_standard_output_can_be_named():
    command = [sys.executable, "-m", "gradcast", "dev", "plan", "vgg16", *NETWORK, "--json", "-o", "/dev/stdout"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    written, _, again = printed.partition("}\n{")
    assert json.loads(written + "}") == json.loads("{" + again)


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    """Renaming needs no right to the file. Root has every right, so it is taken away here."""
    path = tmp_path / "old"
    path.write_text(OLD)
    may = os.access
    monkeypatch.setattr(os, "access", lambda name, mode: os.fspath(name) != os.fspath(path) and may(name, mode))
    for attempt in (lambda: disk.write_file(path, "new", "plan"), lambda: disk.check_writable(path, "plan")):
        with pytest.raises(Error, match="the file is not writable"):
            attempt()
    assert path.read_text() == OLD


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x" * 300, "file name too long"),
        (".", "it is a folder; name a file"),
        ("none/x", "does not exist; make it first"),
        ("loop", "too many levels of symbolic links"),
        ("a\0b", "null"),
    ],
)
def test_what_cannot_be_written_is_said_before_long_work(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(Error, match=words) as caught:
        disk.check_writable(name, "plan")
    assert caught.value.code == "environment"


# --- Reading ---


def test_a_pipe_into_which_nobody_writes_is_refused(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(disk, "_WRITER_POLLS", 2)
    os.mkfifo(tmp_path / "pipe")
    for command in (["report"], ["watch"], ["simulate"], ["dev", "link", "fit"], ["dev", "profile", "import"]):
        refused([*command, tmp_path / "pipe"], "no program writes into the pipe", str(tmp_path / "pipe"))


def test_what_is_written_into_a_pipe_is_read(tmp_path, run):
    os.mkfifo(tmp_path / "pipe")
    text = "".join(json.dumps({"step": step, "step_ms": 300}) + "\n" for step in range(50))
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=[text])
    writer.start()
    assert run("watch", tmp_path / "pipe").out == "steps: 50, alarms: 0\n"
    writer.join(30)


def test_devices_are_not_read(refused):
    for device in ("/dev/zero", "/dev/null"):
        refused(["simulate", device], f"the profile {device} is a device or a socket; give a file")


def test_what_is_too_large_is_not_read(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(disk, "_BYTES_MAX", 1 << 20)
    (tmp_path / "large.json").write_bytes(b" " * ((1 << 20) + 1))
    refused(["simulate", tmp_path / "large.json"], "is larger than", "check that it is the right file")


def test_a_trace_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_files, "_UNPACKED_MAX", 1000)
    trace_files.save({"traceEvents": [" " * 2000]}, tmp_path / "trace.json.gz")
    with pytest.raises(Error, match="holds more than"):
        trace_files.load(tmp_path / "trace.json.gz")


def test_errors_of_the_system_are_passed_on(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(Error, match=r"the run .*run\.json cannot be read: input/output error"):
        disk.read_text(str(tmp_path / "run.json"), "run")
