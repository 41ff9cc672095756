"""The transport over MPI passes what every transport passes, on the processes of mpirun; gradcast-bench uses it."""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import ROOT
from gradcast import bench_results
from transport_conformance import everywhere

RANKS = Path(__file__).with_name("transport_mpi_ranks.py")
LIMIT_S = 240
WITHOUT_MPI = (
    "MPI is not installed here (libopenmpi-dev and openmpi-bin on Debian and Ubuntu), or the tree was built before"
)

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or not list((ROOT / "tests/transport/mpi").glob("_mpi_world.*.so")),
    reason=WITHOUT_MPI,
)


def mpirun(rank_count: int, *command: str) -> subprocess.CompletedProcess:
    """Also as root, and with more ranks than cores, which then give way to one another instead of spinning."""
    environment = os.environ | {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(rank_count), *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment,
    )


@functools.cache
def conformance(rank_count: int) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """How it ended, and by rank the cases that went well."""
    with tempfile.TemporaryDirectory() as folder:
        ended = mpirun(rank_count, sys.executable, str(RANKS), "conformance", folder)
        files = [Path(folder, str(rank)) for rank in range(rank_count)]
        return ended, [file.read_text().splitlines() if file.exists() else [] for file in files]


@needs_mpi
@pytest.mark.parametrize("rank_count", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_the_ranks_end_well(rank_count):
    ended, _ = conformance(rank_count)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("rank_count", "case"),
    [
        pytest.param(size, case, id=f"{size}-{case.__name__}", marks=[] if size == 3 else [pytest.mark.slow])
        for size in (1, 3, 4)
        for case in everywhere(size)
    ],
)
def test_mpi(rank_count, case):
    ended, cases = conformance(rank_count)
    missing = [rank for rank in range(rank_count) if case.__name__ not in cases[rank]]
    assert not missing, f"ranks {missing} did not get through:\n{ended.stderr}"


@needs_mpi
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("uninitialized", "MPI is not initialized; call MPI_Init_thread with MPI_THREAD_MULTIPLE first"),
        ("single_threaded", "MPI runs without MPI_THREAD_MULTIPLE"),
        ("finalized", "make transports before MPI_Finalize"),
    ],
)
def test_wrong_use_is_refused_in_a_sentence(program, words):
    ended = mpirun(1, sys.executable, str(RANKS), program)
    assert ended.returncode == 0, ended.stderr
    assert words in ended.stdout


# --- gradcast-bench ---

BENCH = ROOT / "python/gradcast/bin/gradcast-bench"
QUICK = ["--bytes-max", "64k", "--factor", "4", "--iterations", "4", "--rounds", "2", "--steps", "1"]
QUICK += ["--compute-ms", "5", "--scale-size", "0.001"]
ONE_SIZE = ["--bytes-min", "4", "--bytes-max", "4"]

needs_bench = pytest.mark.skipif(not BENCH.exists(), reason="gradcast-bench is not built: make test builds it")


def bench(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(BENCH), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def results_of(*arguments: str) -> dict:
    ended = bench("--json", *arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


PEAK_KB = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_kb(*arguments: str) -> int:
    """Largest memory of a run. A process starts with its parent's, so a small one lies between."""
    command = [sys.executable, "-S", "-c", PEAK_KB, str(BENCH), *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout)


def check_results(results: dict, transport: str, world_size: int) -> None:
    bench_results.check_results(results, "out")
    assert not any("stream_ns" in row for row in results["sweep"])  # no device carries the operations
    assert (results["version"], results["kind"]) == (1, "gradcast-bench")
    assert (results["transport"], results["world_size"]) == (transport, world_size)
    assert [rank["host"] for rank in results["ranks"]] == world_size * [platform.node()]
    assert [row["size_bytes"] for row in results["sweep"] if row["op"] == "all_reduce"] == [1024, 4096, 16384, 65536]
    assert {row["op"] for row in results["sweep"]} == {"all_reduce", "reduce_scatter", "all_gather"}
    assert all(row["errors"] == 0 and 0 < row["low_ns"] <= row["time_ns"] <= row["high_ns"] for row in results["sweep"])
    for row in results["sweep"]:
        assert row["low_ns"] <= row["p50_ns"] <= row["p90_ns"] <= row["p99_ns"] <= row["high_ns"]
    assert set(results["link"]) >= {"all_reduce", "reduce_scatter", "all_gather"}
    assert results["link"]["pack_ns_per_byte"] > 0
    policies = [row["policy"] for row in results["schedule"]]
    assert policies[0] == "forecast"
    assert {"ddp", "p3", "prophet", "dear"} < set(policies)
    for row in results["schedule"]:
        assert row["compute_ns"] == pytest.approx(5e6, rel=0.01)
        assert row["step_ns"] >= row["compute_ns"]
        assert row["low_ns"] <= row["step_ns"] <= row["high_ns"]
        assert row["predicted_ns"] >= row["bound_ns"] * (1 - 1e-6)
    assert 0 < results["overhead"]["ready_ns"] < 1e6


@needs_bench
def test_bench_between_threads():
    check_results(results_of("--ranks", "3", *QUICK), "inproc", 3)


@needs_bench
@needs_mpi
def test_bench_between_processes():
    ended = mpirun(4, str(BENCH), "--transport", "mpi", "--json", *QUICK)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)
    check_results(results, "mpi", 4)
    assert all(re.match(r"[\w ]*MPI", rank["libraries"]) for rank in results["ranks"])


def check_rows_in_and_out_of_place(results: dict, dtype: str) -> None:
    bench_results.check_results(results, "out")
    expected = [
        (op, size, in_place)
        for op in ("all_reduce", "reduce_scatter", "all_gather")
        for size in (8, 304)
        for in_place in (True, False)
    ]
    assert [(row["op"], row["size_bytes"], row["in_place"]) for row in results["sweep"]] == expected
    assert {(row["dtype"], row["errors"]) for row in results["sweep"]} == {(dtype, 0)}


TWO_SIZES = ["--sweep", "--out-of-place", "--bytes-min", "8", "--bytes-max", "304", "--factor", "38"]


@needs_bench
@needs_mpi
def test_bench_in_bfloat16_between_processes():
    """MPI has no such type; 304 bytes are 152 elements in four parts, of which each rank reads its own."""
    ended = mpirun(4, str(BENCH), "--transport", "mpi", "--json", "--dtype", "bf16", "--iterations", "2", *TWO_SIZES)
    assert ended.returncode == 0, ended.stderr
    check_rows_in_and_out_of_place(json.loads(ended.stdout), "bfloat16")


@needs_bench
@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp64", "float64")])
def test_bench_of_each_type_between_threads(name, dtype):
    """With 17 ranks not every one gives each element a number, so that sums stay exact in 8 bits."""
    arguments = ["--ranks", "17", "--dtype", name, "--iterations", "1", "--warmup", "0", *TWO_SIZES]
    check_rows_in_and_out_of_place(results_of(*arguments), dtype)


@needs_bench
def test_bench_fits_the_link_to_what_is_in_place():
    """Out of place no size is a second sample of the line."""
    sizes = ["--bytes-min", "1k", "--bytes-max", "2k", "--iterations", "1"]
    assert "link" not in results_of("--ranks", "1", "--sweep", "--out-of-place", *sizes)


@needs_bench
def test_bench_has_one_buffer_for_all_sizes():
    many, one = (
        peak_kb("--ranks", "1", "--sweep", "--bytes-min", least, "--bytes-max", "32M", "--iterations", "1")
        for least in ("8", "32M")
    )
    assert many < one + 2048


@needs_bench
@needs_mpi
def test_bench_over_nccl_without_a_device():
    ended = mpirun(1, str(BENCH), "--transport", "nccl", *QUICK)
    if "has 0 CUDA devices" not in ended.stderr:
        pytest.skip("there is a CUDA device, or this build has no NCCL: benchmarks/gpu_check.py is for that")
    assert ended.returncode == 1
    assert "start one rank per device, or use --transport mpi" in ended.stderr


@needs_bench
def test_bench_prints_tables():
    ended = bench("--ranks", "2", "--alpha-us", "100", "--gbit", "1", *QUICK)
    assert ended.returncode == 0, ended.stderr
    for word in (
        "algbw",
        "busbw",
        "p50",
        "p99",
        "all_reduce costs",
        "policy",
        "forecast",
        "ms per step of",
        "us per block",
    ):
        assert word in ended.stdout


@needs_bench
def test_bench_runs_the_part_that_is_named():
    assert not {"sweep", "schedule"} & set(results_of("--overhead"))


@needs_bench
def test_bench_takes_the_cost_of_an_emulated_network_apart():
    """200 us and 8 ns per byte; a busy machine adds to that, never takes away."""
    results = results_of("--ranks", "2", "--sweep", "--alpha-us", "200", "--gbit", "1", "--bytes-max", "1M")
    assert results["link"]["all_reduce"][-1]["beta_ns_per_byte"] > 7
    for row in results["sweep"]:
        assert row["time_ns"] >= 200e3 + 8 * row["size_bytes"]


@needs_bench
def test_bench_sweeps_each_size_once_and_tells_of_few():
    """8, 9.6 and 11.5 bytes are two and three elements."""
    results = results_of("--ranks", "2", "--sweep", "--bytes-min", "8", "--bytes-max", "12", "--factor", "1.2")
    assert [row["size_bytes"] for row in results["sweep"] if row["op"] == "all_reduce"] == [8, 12]


@needs_bench
def test_bench_keeps_no_operation_that_has_ended():
    """A list of them would grow by megabytes, and each operation would search it."""
    peaks_kb = [peak_kb("--ranks", "1", "--sweep", *ONE_SIZE, "--iterations", str(count)) for count in (100, 30_000)]
    assert peaks_kb[1] < peaks_kb[0] + 2048


@needs_bench
def test_bench_names_hosts_and_settings_of_nccl(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    arguments = ["--ranks", "2", "--sweep", *ONE_SIZE]
    assert [rank["environment"] for rank in results_of(*arguments)["ranks"]] == [settings, settings]
    lines = bench(*arguments).stdout.splitlines()
    assert lines[1].startswith(f"  2 ranks on {platform.node()}")
    assert "  NCCL_ALGO=Ring" in lines


@needs_bench
def test_bench_percentiles_are_those_of_the_iterations():
    """Of two iterations half take no longer than the quicker one; without a warm-up the first one counts."""
    (row, *_) = results_of("--ranks", "1", "--sweep", *ONE_SIZE, "--iterations", "2", "--warmup", "0")["sweep"]
    assert row["p50_ns"] == row["low_ns"]
    assert row["p90_ns"] == row["p99_ns"] == row["high_ns"]


@needs_bench
def test_bench_warms_up_as_often_as_told():
    """Each operation takes 5 ms here."""
    slow = ["--ranks", "1", "--sweep", *ONE_SIZE, "--iterations", "1", "--alpha-us", "5000"]
    begin = time.monotonic()
    results_of(*slow, "--warmup", "60")
    assert time.monotonic() - begin > 3 * 62 * 5e-3


@needs_bench
def test_bench_checks_sums_piece_by_piece():
    """Two pieces and a part of a third; each rank's own elements begin and end inside of one."""
    rows = results_of("--ranks", "3", "--sweep", "--bytes-min", "2.3M", "--bytes-max", "2.3M", "--iterations", "1")
    assert [row["errors"] for row in rows["sweep"]] == [0, 0, 0]


@needs_bench
def test_bench_takes_no_folder_for_a_profile(tmp_path, monkeypatch):
    (tmp_path / "resnet18").mkdir()
    monkeypatch.chdir(tmp_path)
    assert results_of("--ranks", "2", "--profile", "resnet18", *QUICK)["schedule"]


@needs_bench
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--transport", "carrier-pigeon"], "--transport is 'carrier-pigeon'; inproc or mpi or nccl is expected"),
        (["--ranks", "0"], "--ranks is '0'; a number from 1 to 1024 is expected"),
        (["--ranks", "2.5"], "a whole number is expected"),
        (["--dtype", "fp8", "--sweep"], "--dtype is 'fp8'; fp32 or bf16 or fp64 is expected"),
        (["--dtype", "bf16"], "the schedule plans with the cost of float32, and --dtype is for the sweep; add --sweep"),
        (["--warmup", "-1"], "--warmup is '-1'; a number from 0 to 1e+06 is expected"),
        (["--bytes-max", "lots"], "--bytes-max is 'lots'; a size from 4 to 64G"),
        (["--bytes-min", "2M", "--bytes-max", "1M"], "--bytes-max is below --bytes-min"),
        (["--profile", "nowhere.json", *QUICK, "--schedule"], "no file and no bundled profile 'nowhere.json'"),
        (["--bytes-min", "1M", "--bytes-max", "1M", "--schedule"], "needs a sweep of three sizes or more"),
        (["--frobnicate"], "--frobnicate is not an option; gradcast-bench --help lists them"),
        (["--rounds"], "--rounds lacks its value"),
        (["sweep"], "'sweep' is not an option"),
    ],
)
def test_bench_says_what_is_wrong(arguments, words):
    ended = bench(*arguments)
    assert ended.returncode == 2, ended.stdout
    assert words in ended.stderr
    assert ended.stderr.startswith("gradcast-bench: ")
    assert ended.stdout.count("\n") < 3 or "algbw" in ended.stdout


@needs_bench
def test_bench_help_names_every_option():
    text = bench("--help").stdout
    for name in ("--transport", "--bytes-min", "--profile", "--in-flight", "--json", "mpirun -n 4 gradcast-bench"):
        assert name in text
