"""``torchrun … -m gradcast network --bench``: all-reduces by size on training's path, and the link that it fits."""

import functools
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from gradcast import bench_results
from gradcast.cli import network
from gradcast.diagnosis.network import bench
from gradcast.errors import Error
from gradcast.training.measure import network_cost
from gradcast.training.measure.network_cost import Sample
from training.launch import torchrun

SIZES = [8, 128, 2048, 32768]
SWEEP = ["--bytes-min", "8B", "--bytes-max", "32KiB", "--factor", "16", "--iterations", "4", "--warmup", "1"]


@functools.cache
def results(*arguments):
    out = torchrun("-m", "gradcast", "network", "--bench", "--device", "cpu", *SWEEP, *arguments, rank_count=4)
    return out if "--json" not in arguments else json.loads(out)


def test_every_size_is_timed_on_all_ranks():
    found = bench_results.check_results(results("--json"), "out")
    assert (found["transport"], found["world_size"], len(found["ranks"])) == ("gloo of torch", 4, 4)
    assert [row["size_bytes"] for row in found["sweep"]] == SIZES
    for row in found["sweep"]:
        assert (row["errors"], row["dtype"], row["in_place"]) == (0, "float32", True)
        assert 0 < row["low_ns"] <= row["p50_ns"] <= row["p90_ns"] <= row["p99_ns"] <= row["high_ns"]
        assert row["busbw_gb_per_s"] == pytest.approx(1.5 * row["algbw_gb_per_s"])


def test_simulate_takes_the_results_as_a_link(tmp_path, run):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(results("--json")))
    result = run("simulate", "resnet50", "--link", path)
    assert (result.code, result.err) == (0, "")
    assert f"the link of {path}" in result.out


@pytest.mark.slow
def test_the_table_is_that_of_gradcast_bench():
    lines = results("--dtype", "bf16").splitlines()
    assert lines[0].startswith("4 ranks over gloo of torch ")
    assert lines[2:4] == bench_results.header().splitlines()
    for line, size_bytes in zip(lines[4:8], SIZES, strict=True):
        assert line.split()[:6] == [str(size_bytes), str(size_bytes // 2), "bfloat16", "sum", "all_reduce", "in"]
        assert line.split()[9] == "0"
    assert lines[-1].startswith("all_reduce costs ")


def test_the_link_is_the_one_that_a_warm_up_fits():
    """Its stalls, which gradcast-bench's fit omits, and its correction of blocks that found the network idle."""
    samples = [
        Sample(size, 1e5 + size + late - (0 if follows else 3e4), follows)
        for size in (1000, 8000, 64_000)
        for follows in (False, True)
        for late in (0, 0, 0, 9e4)
    ]
    found = bench.fitted(samples, 0.5)
    assert found["link"] == json.loads(network_cost.fit_link(samples, 0.5).to_json())
    assert found["fit"]["all_reduce"]["relative_error_max"] > 0


@pytest.mark.parametrize("world_size", [1, 2, 16, 17, 100, 512])
def test_sums_are_exact_in_every_type(world_size):
    places = torch.arange(500)
    given = [bench.Numbers(rank, world_size).given(places) for rank in range(world_size)]
    sums = torch.stack(given).sum(0)
    assert torch.equal(sums, bench.Numbers(0, world_size).sums(places))
    assert sums.max() <= 256  # up to which bf16 has all whole numbers
    assert all(each.any() for each in given)


@pytest.mark.parametrize(("factor", "wrong"), [(2, 0), (1, 128), (3, 128)])
def test_elements_that_are_not_the_sum_are_counted(factor, wrong):
    """Of two ranks, of which each gives 1 + i % 7 and the second one more."""
    flat = torch.empty(128)
    numbers = bench.Numbers(0, 2)
    numbers.write(flat)
    flat.mul_(factor).add_(1)
    assert numbers.wrong_count(flat) == wrong


def test_a_rank_without_the_memory(monkeypatch):
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    with pytest.raises(Error, match="rank 3 has no memory for 2 blocks of 1024 bytes; give a smaller --bytes-max"):
        bench.Bench(SimpleNamespace(rank=3, device=torch.device("cpu")), bench.Sweep(bytes_max=1024))


def test_a_host_without_a_device(refused, monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(["network", "--bench", "--device", "cuda"], "this host has 0 CUDA devices", "or use --device cpu")


def test_sizes_are_whole_elements_and_each_is_there_once():
    assert bench.Sweep("bf16", 3, 12, 1.3).sizes_bytes == [4, 6, 8, 12]
    assert bench.Sweep("fp64", 8, 8).sizes_bytes == [8]
    assert bench.Sweep("fp32", 8, 1 << 30, 2).sizes_bytes == [8 << power for power in range(28)]


def test_wrong_sums_are_an_error(capsys):
    row = results("--json")["sweep"][0] | {"errors": 3}
    with pytest.raises(Error, match="3 elements of the sums were wrong: do not train over this transport"):
        network.report_bench({"sweep": [row]}, as_json=True)
    assert json.loads(capsys.readouterr().out)["sweep"][0]["errors"] == 3


def test_a_line_of_the_table():
    row = {
        "op": "all_gather", "dtype": "float16", "in_place": False, "size_bytes": 1 << 20, "time_ns": 1_234_567.0,
        "p50_ns": 1e6, "p90_ns": 2e6, "p99_ns": 3e6, "algbw_gb_per_s": 0.8493, "busbw_gb_per_s": 0.425, "errors": 7,
    }  # fmt: skip
    words = "1048576 524288 half none all_gather out 1234.6 0.849 0.425 7 1000.0 2000.0 3000.0"
    assert bench_results.line(row).split() == words.split()
    assert len({len(line) for line in (*bench_results.header().splitlines(), bench_results.line(row))}) == 1
