"""The mirror of NCCL as far as it goes without a GPU: its symbols, what it answers, and one process as rank 0 of 16."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from conftest import ROOT
from gradcast import _core
from training.needs import torch

LIBRARY = ROOT / os.environ.get("GRADCAST_BUILD", "build") / "benchmarks/nccl_mirror/libnccl.so.2"
UNHANDLED_CUDA_ERROR, INVALID_USAGE = 1, 5


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


@pytest.fixture(scope="module")
def library():
    if not LIBRARY.exists():
        pytest.skip("the mirror of NCCL is not built: that needs nvcc and NCCL 2.28 or later")
    library = ctypes.CDLL(str(LIBRARY))
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def symbols(path, which):
    listed = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm here")
def test_it_has_the_symbols_that_torch_imports_and_shows_no_others(library):
    torchs = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")
    if not os.path.exists(torchs):
        pytest.skip("this torch is built without CUDA")
    imported = {name for name in symbols(torchs, "--undefined-only") if name.startswith("nccl")}
    own = symbols(LIBRARY, "--defined-only")
    assert imported
    assert imported <= own
    assert {name for name in own if not name.startswith("nccl")} == set()


def test_what_it_answers_without_a_gpu(library):
    version, identity = ctypes.c_int(), UniqueId()
    assert library.ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value >= 22800
    assert library.ncclGetUniqueId(ctypes.byref(identity)) == 0
    assert library.ncclGetErrorString(0) == b"no error"
    assert b"mirror of NCCL" in library.ncclGetErrorString(INVALID_USAGE)


def test_it_refuses_what_it_cannot_mirror(library):
    communicator = ctypes.c_void_p()
    assert library.ncclCommInitRank(ctypes.byref(communicator), 16, UniqueId(), 3) == INVALID_USAGE
    assert b"rank 0 only" in library.ncclGetLastError(None)
    assert library.ncclSend(None, ctypes.c_size_t(1), 7, 1, None, None) == INVALID_USAGE
    assert b"between two ranks" in library.ncclGetLastError(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(library):
    communicator = ctypes.c_void_p()
    assert library.ncclCommInitRank(ctypes.byref(communicator), 16, UniqueId(), 0) == UNHANDLED_CUDA_ERROR
    assert library.ncclGetLastError(None)


def test_torch_takes_it_for_nccl(library):
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    # That of NCCL is never so empty.
    program = "import torch; print(torch.cuda.nccl.unique_id() == bytes(128))"
    program += "; import ctypes; ctypes.CDLL(None).nccl_mirror_set_link"  # with which mirror.py sees it
    preloaded = os.environ | {"LD_PRELOAD": str(LIBRARY)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=preloaded, capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "True\n"


def test_one_process_passes_for_sixteen_ranks():
    """Agreements through the group and through the store, and a plan for 16 hosts."""
    from benchmarks.nccl_mirror.mirror import rank_zero

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with rank_zero(16, "fake"):
        handle = gradcast.attach(module, sgd)
        for _ in range(8):
            sgd.zero_grad()
            with handle.weight(4):
                module(torch.ones(4, 8)).sum().backward()
            sgd.step()
        handle.flush()
        stats = handle.stats()
        assert (stats["world_size"], stats["hosts"]) == (16, {"count": 16, "ranks_per_host": 1})
        assert stats["predicted_ms"] is not None
        handle.detach()


def test_after_a_detach_it_passes_for_them_again():
    """Torch's "fake" group does not count its operations, so gradcast does not know whether it may use it again."""
    from benchmarks.nccl_mirror.mirror import rank_zero

    with rank_zero(2, "fake"):
        for _ in range(2):
            gradcast.attach(torch.nn.Linear(2, 2)).detach()


@pytest.mark.parametrize("window", [1, 2, 16])
def test_a_window_is_the_engines(monkeypatch, window):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror import mirror

    engine = mock.Mock(side_effect=_core.Engine)
    monkeypatch.setattr(_core, "Engine", engine)
    assert f"gradcast overlap {window}" in mirror.WAYS
    with mirror.rank_zero(2, "fake"):
        task = mirror.SMALL_TASKS["small GPT"]
        training = mirror.Training(task, f"gradcast overlap {window}", torch.device("cpu"), torch.optim.AdamW)
        training.end()
    assert engine.call_args.kwargs["queue_window"] == window


def test_the_gpu_is_idle_where_no_kernel_but_nccls_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror.mirror import idle_ms

    def kernel(begin, end, name="gemm"):
        return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    events = [
        kernel(1000, 2000),
        kernel(1500, 3000),
        kernel(3000, 3600, "void nccl_mirror::run<float>(Job, Wire*)"),
        kernel(4000, 5000),
        kernel(5000, 9000, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
    ]
    assert idle_ms(events) == pytest.approx(1.0)


def test_kernels_and_calls_about_events_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror.mirror import counted

    calls = ("cudaEventRecordWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery", "cudaLaunchKernel")
    events = [{"cat": "cuda_runtime", "name": name} for name in calls] + [{"cat": "kernel", "name": "gemm"}]
    assert counted(events) == {"kernels": 1, "records": 2, "waits": 1, "queries": 1}


@pytest.mark.parametrize(
    ("way", "gain", "as_predicted", "gbit", "compiled", "goal"),
    [
        ("gradcast fallback DDP", "0.970", 1.0, 100, False, "at least 0.99 x best DDP, measured 0.970"),
        ("gradcast overlap", "1.320", 1.0, 25, False, "at least 1.3 x best DDP, measured 1.320"),
        ("gradcast overlap", "0.960", 1.0, 100, False, None),
        ("gradcast overlap", "1.060", 1.16, 25, True, "within 5 % of the prediction, measured 1.160 of it"),
        ("DDP 25 MiB", "1.000", None, 25, False, None),
    ],
)
def test_goals_are_printed_beside_what_was_measured(monkeypatch, way, gain, as_predicted, gbit, compiled, goal):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror.mirror import goals

    row = {"": way, "x best DDP": gain, "measured / predicted": as_predicted}
    expected = [] if goal is None else [f"goal: {way} {goal} (ResNet-50, {gbit} Gbit/s)"]
    assert list(goals(row, "ResNet-50", gbit, compiled=compiled)) == expected


def test_a_forced_fallback_runs_as_ddp(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror import mirror

    with mirror.rank_zero(2, "fake"):
        device, adamw = torch.device("cpu"), torch.optim.AdamW
        training = mirror.Training(mirror.SMALL_TASKS["small GPT"], mirror.FALLBACK, device, adamw)
        training.settle()
        assert training.end()["runs_as_ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--compiled", "--optimizer", "foreach"]], ids=["eager", "compiled"])
def test_every_way_trains_on_the_cpu(options):
    command = [sys.executable, "-m", "benchmarks.nccl_mirror.mirror", "--device", "cpu", "--gbit", "10", "--steps", "2"]
    ended = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "alone, gradcast hook, gradcast overlap: the same parameters after 24 steps, bit for bit" in ended.stdout
    # DDP needs another group than "fake".
    for way in (
        "alone",
        "FSDP2",
        "gradcast hook",
        *(f"gradcast overlap{window}" for window in ("", " 1", " 2", " 16")),
        "gradcast fallback",
    ):
        assert ended.stdout.count(f"\n| {way}  ") == 2
    assert ("compiled blocks, AdamW foreach" if options else "eager, AdamW fused") in ended.stdout


def arguments(**changed):
    settings = {"gbit": [10.0], "latency_us": 20.0, "workers": 2, "models": ["GPT"], "ways": ["alone"], "turns": 5}
    settings |= {"steps": 1, "minutes": 6.0, "compiled": False, "optimizer": "fused", "traces": None}
    return SimpleNamespace(**settings | changed)


def test_what_there_was_no_time_for_is_told_and_has_not_passed(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror import mirror

    def left_out(*moments_s):
        clock = mock.Mock(wraps=time, monotonic=mock.Mock(side_effect=moments_s))
        with mock.patch.object(mirror, "time", clock):
            return mirror.table(mirror.SMALL_TASKS, torch.device("cpu"), arguments(turns=3), lambda *_: None)

    # When it begins, before the table, and before each round of turns but the first.
    assert left_out(0, 0, 10, 20) == []
    (title,) = left_out(0, 361)
    assert title.startswith("small GPT, eager, AdamW fused, 2 ranks, 10 Gbit/s")
    assert left_out(0, 0, 361) == [f"2 of 3 turns of {title}"]
    monkeypatch.setattr(mirror, "differing", lambda *_, **__: [])
    monkeypatch.setattr(sys, "argv", ["mirror", "--device", "cpu", "--workers", "2", "--gbit", "10", "--minutes", "0"])
    capsys.readouterr()
    assert mirror.main() == 3
    assert capsys.readouterr().out.count("left out, because 0 minutes were over: small ") == 2


def test_each_kind_of_block_is_compiled(monkeypatch):
    """ResNet-50 has as many kinds of one block as torch compiles by default; more would run uncompiled."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.nccl_mirror import mirror

    def blocks(count):
        widths = range(1, count + 1)
        made = [mirror.Bottleneck(1 if width == 1 else 4 * width - 4, width, 1) for width in widths]
        return torch.nn.Sequential(*made, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        mirror.begin_compiling()
        torch._dynamo.utils.counters.clear()
        sgd = partial(torch.optim.SGD, lr=0.1)
        batch = torch.ones(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64)
        task = mirror.Task(lambda: blocks(9), lambda _: batch, 1)
        mirror.Training(task, "alone", torch.device("cpu"), sgd, compiled=True).step()
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert compiled == 9
