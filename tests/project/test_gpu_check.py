"""The program that runs what needs a GPU, and the kit for it, with checks that stand for those on a GPU."""

import os
import subprocess
import sys
import time

import pytest
from benchmarks import gpu_check, gpu_kit
from benchmarks.gpu_check import FIRST, LONGER, Check, limit_s

from conftest import ROOT

PASSES, FAILS = "{python} -c pass", "{python} -c 'print(5); raise SystemExit(4)'"


def machine(folder, device="cuda", identity="a GPU, tree 1"):
    return gpu_check.Machine(device, folder, folder, os.environ, identity)


def rows(folder):
    """By check, of the table's lines."""
    lines = (folder / "table.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line[0] not in "= "}


def is_over(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
    return state.strip()[:1] in ("", "Z")


def run(folder, *checks, deadline_s=60.0, **settings):
    return gpu_check.run(checks, machine(folder, **settings), deadline_s)


def test_checks_are_in_the_order_of_their_value():
    names = [each.name for each in FIRST]
    assert names[:4] == ["smoke", "ddp", "order", "nccl-options"]
    assert names[4:] == ["sharded", "mirror", "host-bound", "memory", "compiled", "reduce-overhead", "tiny"]
    assert sum(each.budget_s for each in FIRST) <= 14 * 60
    assert max(each.budget_s for each in (*FIRST, *LONGER)) <= gpu_check.DEADLINE_S
    assert len({each.name for each in (*FIRST, *LONGER)}) == len(FIRST) + len(LONGER)
    assert [each.name for each in gpu_check.chosen("tiny|mirror-25")] == ["tiny", "mirror-25"]
    assert list(gpu_check.chosen(None)) == [*FIRST]


@pytest.mark.parametrize(
    ("budget_s", "left_s", "later_s", "expected_s"),
    [
        (60, 600, 500, 100),  # what is to spare
        (60, 600, 100, 120),  # at most as much again
        (60, 600, 590, 60),  # later ones may lack time
        (60, 61, 0, 61),
    ],
)
def test_a_check_may_take_what_is_to_spare(budget_s, left_s, later_s, expected_s):
    assert limit_s(budget_s, left_s, later_s) == expected_s


def test_each_check_has_a_line_and_what_was_not_reached_is_named(tmp_path, capsys):
    skips = "{python} -c 'print(\"3 passed, 1 skipped\")'"
    tells = "{python} -c 'print(\"measured: 5 MiB\\nother\\ngoal: 1, measured 0.9\\nNCCL refuses two ranks\")'"
    omits = "{python} -c 'print(\"left out, because 6 minutes were over: GPT-2\"); raise SystemExit(3)'"
    some = "{python} -c 'print(\"case registered memory: left out: that is for NCCL\")'"
    checks = (("good", PASSES), ("bad", FAILS), ("skips", skips), ("tells", tells), ("omits", omits), ("some", some))
    checks = [Check(name, 5, command) for name, command in checks]
    checks += [Check("absent", 5, "no-such-program"), Check("long", 1000, PASSES), Check("last", 1, PASSES)]
    assert run(tmp_path, *checks) == 1
    found = rows(tmp_path)
    assert list(found) == [each.name for each in checks]
    assert found["good"].startswith("passed, ")
    assert "exit status 4, see" in found["bad"]
    assert found["skips"].startswith("FAILED, something was skipped")
    assert found["omits"].startswith("left out: because 6 minutes were over: GPT-2, see ")
    assert found["some"].endswith(" s, but left out: registered memory: that is for NCCL")
    assert found["absent"] == "left out: there is no no-such-program here"
    assert found["long"].startswith("not reached: ")
    assert found["long"].endswith(" s were left, and it may take 1000")
    assert found["last"].startswith("passed, ")
    text = (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert "    measured: 5 MiB\n    goal: 1, measured 0.9\n    NCCL refuses two ranks\n" in text
    assert "other" not in text
    assert capsys.readouterr().out == text


def test_a_hung_check_is_ended_with_all_its_processes(tmp_path):
    """Its log says where it was; the next check has its time."""
    program = tmp_path / "hangs.py"
    child = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); print(0, flush=True); time.sleep(600)"
    program.write_text(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    hangs = Check("hangs", 2, f"{{python}} -X faulthandler {program}")
    assert run(tmp_path, hangs, Check("next", 1, PASSES), deadline_s=20) == 1
    found = rows(tmp_path)
    assert found["hangs"].startswith("FAILED, it had not ended after ")
    assert found["next"].startswith("passed, ")
    log = (tmp_path / "hangs.log").read_text(encoding="utf-8")
    assert 'hangs.py", line 5 in <module>' in log
    assert is_over(log.split()[1])


def test_a_later_run_does_what_is_still_open(tmp_path):
    """Of the same tree on the same device; what failed runs again."""
    counts = '{python} -c \'open("{logs}/count", "a").write("x")\''
    checks = Check("once", 5, counts), Check("bad", 5, FAILS), Check("long", 100, PASSES)
    assert run(tmp_path, *checks) == 1
    assert run(tmp_path, *checks[::2], deadline_s=200) == 0
    assert rows(tmp_path)["long"].startswith("passed, ")
    assert (tmp_path / "count").read_text() == "x"
    assert run(tmp_path, checks[0], identity="a GPU, tree 2") == 0
    assert gpu_check.run(checks[:1], machine(tmp_path), 60, again=True) == 0
    assert (tmp_path / "count").read_text() == "xxx"


def test_one_that_is_told_to_end_ends_its_check(tmp_path):
    """As a machine's owner does when the time is over."""
    sleeps = f'{sys.executable} -c "import os, time; print(os.getpid(), flush=True); time.sleep(600)"'
    program = (
        "import pathlib, sys, os\nfrom benchmarks import gpu_check as c\n"
        f"c.FIRST = (c.Check('sleeps', 60, {sleeps!r}, on_cpu=True),)\nsys.exit(c.main())\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "sleeps.log"
    deadline_s = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline_s:
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 128 + 15
    assert is_over(log.read_text().split()[0])


def test_on_the_cpu_a_real_check_passes_and_the_deadline_cuts(tmp_path):
    """The mirror does not fit into what is left; what needs a GPU is left out."""
    arguments = [str(tmp_path), "--device", "cpu", "--only", "smoke|order|mirror-25", "--deadline", "250"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = rows(tmp_path)
    assert found["smoke"].startswith("passed, "), (tmp_path / "smoke.log").read_text()
    assert found["order"] == "left out: it needs a GPU"
    assert found["mirror-25"].startswith("not reached: ")
    assert ended.returncode == 3
    assert "the parameters are DDP's, bit for bit, after 12 steps in both modes" in (tmp_path / "smoke.log").read_text()


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_check", str(tmp_path)])
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    assert gpu_check.main() == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


def kit_of(folder, sources=None):
    """A kit without anything but its mark."""
    (folder / "modules").mkdir()
    (folder / "sources").write_text(f"{sources or gpu_kit.digest(gpu_kit.SOURCES, gpu_kit.CPP)}\n", encoding="utf-8")
    return folder


def refusal(kit):
    with pytest.raises(gpu_kit.KitError) as error:
        gpu_kit.site_of(kit)
    return str(error.value)


def test_a_kit_that_does_not_fit_is_refused_in_one_sentence(tmp_path):
    assert refusal(tmp_path).endswith("`make gpu-kit` builds one, on any machine with nvcc")
    kit = kit_of(tmp_path, sources="other")
    assert refusal(kit).endswith("was built from other C++ sources than this tree's; `make gpu-kit` again")
    (kit / "sources").unlink()
    (kit / "modules").rmdir()
    kit_of(kit)
    minor = sys.version_info.minor
    said = refusal(kit)
    assert f"has no _core.cpython-3{minor}" in said
    assert f"this is Python 3.{minor} with torch " in said
    assert said.endswith(f"`make gpu-kit GPU_PYTHON=python3.{minor}`, or here with --build")
    for name in gpu_kit.module_names():
        (kit / "modules" / name).write_bytes(b"no module")
    assert "the kit's modules do not load" in refusal(kit)


def test_a_kit_is_used_without_changing_the_tree(tmp_path):
    """Its copy of the package loads the kit's modules, and compiles nothing."""
    from gradcast.training.compat import extension

    kit = kit_of(tmp_path)
    own = [next((ROOT / "python/gradcast").glob("_core.*.so")), extension.find()]
    before = {each: each.stat().st_mtime_ns for each in (ROOT / "python/gradcast").iterdir()}
    for source, name in zip(own, gpu_kit.module_names(), strict=True):
        (kit / "modules" / name).write_bytes(source.read_bytes())
    site = gpu_kit.site_of(kit)
    program = "import gradcast.training.compat.extension as e; print(e.load().__file__)"
    environment = os.environ | {"PYTHONPATH": str(site), "GRADCAST_CACHE_DIR": str(tmp_path / "none")}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(site / "gradcast" / gpu_kit.module_names()[1])
    assert not (tmp_path / "none").exists()
    assert {each: each.stat().st_mtime_ns for each in (ROOT / "python/gradcast").iterdir()} == before
