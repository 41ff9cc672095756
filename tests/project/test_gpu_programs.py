"""What benchmarks/gpu_check.sh runs on a GPU, as far as it can be tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.needs import torch  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """benchmarks/ is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


def results(**kernels):
    entries = [
        {"name": f"{name}/{size << 20}/manual_time", "bytes_per_second": rate}
        for name, rates in kernels.items()
        for size, rate in rates.items()
    ]
    return json.dumps({"benchmarks": entries})


@pytest.mark.parametrize(("rate", "is_fast"), [(860e9, True), (840e9, False)])
def test_a_kernel_is_held_against_a_copy_of_the_same_bytes(rate, is_fast):
    from benchmarks import gpu_bandwidth

    # Small blocks do not count: to start a kernel takes longer than to run it.
    found = gpu_bandwidth.measured(results(device_copy={1: 500e9, 16: 1000e9}, kernel={1: 10e9, 16: rate}))
    text, told = gpu_bandwidth.table(found)
    assert told is is_fast
    assert f"{rate / 1e12:.0%}" in text


@pytest.mark.parametrize(
    "text",
    [
        results(device_copy={1: 500e9}, kernel={1: 10e9}),
        results(device_copy={16: 500e9}),
        results(kernel={16: 500e9}),
        json.dumps({"benchmarks": [{"name": "kernel/16/manual_time", "error_message": "no kernel image"}]}),
    ],
)
def test_nothing_to_compare_is_no_success(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_bandwidth", str(tmp_path / "results.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(str(tmp_path))


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


@pytest.mark.slow
def test_the_training_gives_the_numbers_of_ddp_in_both_modes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--steps", "20", "--width", "32"]
    ended = subprocess.run(
        [*command, str(ROOT / "benchmarks" / "gpu_training.py"), *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the parameters are DDP's, bit for bit, after 20 steps in both modes" in ended.stdout
    rows = [
        line.split()[0] for line in ended.stdout.splitlines() if line and line.split()[0] in ("ddp", "hook", "overlap")
    ]
    assert rows == ["ddp", "hook", "overlap"]
