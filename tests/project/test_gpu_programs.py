"""What benchmarks/gpu_check.py runs on a GPU, as far as it can be tried without one; which actions are measured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import gradcast
from training.needs import torch  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_are_compiled_for_all_devices_since_a100():
    """And as PTX, which the driver of a later device translates."""
    path = ROOT / os.environ.get("GRADCAST_BUILD", "build") / "compile_commands.json"
    listed = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    commands = [each["command"] for each in listed if each["file"].endswith(".cu")]
    if not commands:
        pytest.skip("no kernel is compiled here: that needs nvcc")
    said = subprocess.run([commands[0].split()[0], "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = map(int, re.search(r"release (\d+)\.(\d+)", said).groups())
    newest = 100 if (major, minor) >= (12, 8) else 90  # what nvcc knows
    for command in commands:
        codes = {code for each in re.findall(r"code=\[([^]]*)\]", command) for code in each.split(",")}
        assert codes == {"sm_80", "sm_90", f"sm_{newest}", f"compute_{newest}"}, command


def test_time_in_which_the_device_copies_and_computes_counts_once():
    from benchmarks.gpu_training import together_ms

    def event(kind, begin, end, stream):
        return {"ph": "X", "cat": kind, "ts": begin, "dur": end - begin, "args": {"stream": stream}}

    events = [
        event("kernel", 0, 1000, 7),
        event("kernel", 2000, 3000, 7),
        event("gpu_memcpy", 500, 1500, 20),  # 500 beside the first kernel
        event("gpu_memcpy", 800, 900, 21),  # nothing more
        event("gpu_memcpy", 1500, 2100, 20),  # 100 beside the second
        event("gpu_memcpy", 2500, 2600, 7),  # on the stream that computes
        {"ph": "M", "name": "process_name"},
    ]
    assert together_ms(events) == pytest.approx(0.6)


def test_nccl_takes_the_ranks_for_hosts_of_their_own():
    """It compares hosts first, then devices."""
    from benchmarks.gpu_ranks import as_a_host_of_its_own

    hosts = [as_a_host_of_its_own(rank)["NCCL_HOSTID"] for rank in range(2)]
    assert len(set(hosts)) == 2
    assert as_a_host_of_its_own(0).items() - as_a_host_of_its_own(1).items() == {("NCCL_HOSTID", hosts[0])}


@pytest.mark.parametrize("variants", ["A", "AB", "ABC", "ABCD"])
def test_turns_favour_no_variant(variants):
    """In each pair of rounds all have the same sum under a drift that grows evenly; each comes first as often."""
    from benchmarks.on_hosts import in_turns

    count = len(variants)
    turns = "".join(in_turns(variants, 2 * count))
    for start in range(0, len(turns), 2 * count):
        pair = turns[start : start + 2 * count]
        assert {pair.index(each) + pair.rindex(each) for each in variants} == {2 * count - 1}
        assert set(pair[:count]) == set(variants)
    assert turns.startswith(variants)
    assert sorted(turns[:: 2 * count]) == sorted(variants)


def test_actions_that_the_script_cannot_take_are_left_out():
    from benchmarks.doctor_actions import taken

    how = "DistributedDataParallel(model, bucket_cap_mb=8)"
    assert taken({"key": "bucket", "how": how}) == (("--bucket-mib", "8"), 1)
    assert taken({"key": "accumulate"}) == (("--accumulate", "2"), 2)
    assert taken({"key": "launch"}) is taken({"key": "connections"}) is None


def run(*arguments, limit_s=250):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def states(printed):
    """By case."""
    return dict(line.removeprefix("case ").split(": ", 1) for line in printed.splitlines() if line.startswith("case "))


def test_a_rank_that_hangs_says_where_and_is_ended(tmp_path, capsys, monkeypatch):
    from benchmarks import gpu_ranks

    program = "import os, time\nprint('rank', os.environ['RANK'], flush=True)\nif os.environ['RANK'] == '1':\n"
    (tmp_path / "hangs.py").write_text(program + "    time.sleep(600)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_ranks.signal, "signal", lambda *_: None)
    args = SimpleNamespace(device="cpu", backend="gloo")
    ended = gpu_ranks.start("hangs", [], args, limit_s=3)
    assert ended.codes == [0, None]
    assert 'hangs.py", line 4 in <module>' in ended.said
    printed = capsys.readouterr().out
    assert ended.said in printed
    assert printed.endswith("after 3 s the ranks 1 had not ended; they were ended\n")


@pytest.mark.slow
def test_the_cases_for_two_ranks_pass_on_the_cpu():
    ended = run("benchmarks.gpu_cases", "--device", "cpu", "--steps", "100", limit_s=500)
    found = states(ended.stdout)
    left_out = {case: state for case, state in found.items() if state.startswith("left out: ")}
    assert {case for case in left_out if case.startswith("SyncBatchNorm and metrics")} == {
        "SyncBatchNorm and metrics",
        *(f"SyncBatchNorm and metrics, {count} connections" for count in (2, 8, 32)),
    }
    assert {case for case, state in left_out.items() if state == "left out: that is for NCCL"} == {
        "at most 2 thread blocks",
        "fewer thread blocks",
        "registered memory",
        "the launch order of NCCL",
    }
    assert len(left_out) == 8
    assert len(found) == 23
    assert {state for case, state in found.items() if case not in left_out} == {"passed"}, ended.stdout
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("said", "code"),
    [("Duplicate GPU detected", 0), ("rank 1 is using the same GPU as rank 0", 0), ("unhandled system error", 1)],
)
def test_only_where_nccl_refuses_two_ranks_on_one_gpu_the_cases_run_over_gloo(monkeypatch, capsys, said, code):
    from benchmarks import gpu_cases
    from benchmarks.gpu_ranks import Ended

    runs = []

    def run_case(case, args):
        runs.append((case, args.backend))
        return Ended([0, 0], "") if args.backend == "gloo" else Ended([1, 1], said)

    monkeypatch.setattr(gpu_cases, "run_case", run_case)
    arguments = ["--device", "cpu", "--backend", "nccl", "registered memory", "batch norm"]
    monkeypatch.setattr(sys, "argv", ["gpu_cases", *arguments])
    assert gpu_cases.main() == code
    printed = capsys.readouterr().out
    assert ("\nNCCL refuses two ranks on one GPU" in printed) == (code == 0)
    first = ("registered memory", "nccl")
    assert runs == [first, ("batch norm", "gloo" if code == 0 else "nccl")]
    if code == 0:
        assert states(printed)["registered memory"] == "left out: that is for NCCL"


def test_a_case_that_goes_wrong_fails(monkeypatch, capsys):
    from benchmarks import gpu_cases
    from benchmarks.gpu_ranks import Ended

    monkeypatch.setattr(gpu_cases, "run_case", lambda case, args: Ended([0, 1], f"of {case}"))
    monkeypatch.setattr(sys, "argv", ["gpu_cases", "--device", "cpu", "metrics", "a killed rank"])
    assert gpu_cases.main() == 1
    assert states(capsys.readouterr().out) == {"metrics": "FAILED, exit codes [0, 1]", "a killed rank": "passed"}


def test_where_every_case_is_left_out_nothing_has_passed(monkeypatch):
    from benchmarks import gpu_cases

    monkeypatch.setattr(sys, "argv", ["gpu_cases", "--device", "cpu", "registered memory"])
    assert gpu_cases.main() == 3


def test_what_grows_is_found():
    from benchmarks.gpu_resources import grown

    first = {"device, MiB": 10.0, "host, MiB": 600.0, "threads": 11, "files": 30}
    assert grown(first, first | {"device, MiB": 10.5, "host, MiB": 630.0, "threads": 9}) == []
    more = {"device, MiB": 11.5, "host, MiB": 640.0, "threads": 12, "files": 31}
    assert [each.split(" has grown")[0] for each in grown(first, more)] == [*first]


@pytest.mark.parametrize(
    ("code", "message", "begun_steps", "wrong"),
    [
        ("communication", "Failed: rank 0; rank 1 has not responded", 11, None),
        ("communication", "Failed: ranks 0 and 1", 11, None),
        ("communication", "rank 0 of 2 has failed", 11, "does not name rank 1"),
        ("invalid_use", "attach failed on rank 1 of 2: this module", 11, "the error's code is invalid_use"),
        ("communication", "connecting rank 1", 8, "raised in step 7, before anything had happened"),
    ],
)
def test_an_error_counts_if_it_tells_of_what_has_happened(code, message, begun_steps, wrong):
    from benchmarks.gpu_cases import CASES

    class Rank:
        index = 0

        def train(self, *_, **__):
            self.begun_steps = begun_steps
            raise gradcast.Error(message, code)

    problems = list(CASES["a late rank"].run(Rank()))
    assert len(problems) == (wrong is not None)
    assert wrong is None or wrong in problems[0]


def test_kernels_are_held_against_a_copy():
    ended = run("benchmarks.gpu_bandwidth", "--device", "cpu", "--mib", "1")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^a copy +\d+ +1\.00$", ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.slow
def test_the_training_gives_the_numbers_of_ddp_in_both_modes():
    ended = run("benchmarks.gpu_training", "--device", "cpu", "--steps", "20", "--width", "32")
    assert ended.returncode == 0, ended.stderr
    assert "the parameters are DDP's, bit for bit, after 20 steps in both modes" in ended.stdout
    rows = [
        line.split()[0] for line in ended.stdout.splitlines() if line and line.split()[0] in ("ddp", "hook", "overlap")
    ]
    assert rows == ["ddp", "hook", "overlap"]


def test_differences_that_are_equal_for_all_seeds_have_no_standard_error():
    from benchmarks.int8_training import VARIANTS, table

    runs = [{"variant": variant, "seed": seed, "curve": [1.0, 0.5]} for variant in VARIANTS for seed in range(2)]
    assert [line.split("|")[4].strip() for line in table(runs).splitlines()[2:]] == ["-"] * 3
