"""Misconfigurations: each is found if it is present, and only then. Pure, on hand-made evidence."""

import dataclasses
from pathlib import Path

import pytest

from diagnosis import doctor_runs
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.lint import Evidence, mistakes
from gradcast.diagnosis.analyze.lint_costs import Layout
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.observe.environment import HostCpu, Process, usable_cores

# A training without mistakes: four gradients come one after the other, the last one registered first.
SETUP = doctor_runs.setup()
SEEN = Layout(ready_ms=[100, 75, 50, 25], backward_ms=100, buckets=[[3, 2], [1, 0]], best_cap_mib=4)
KNOWN = Evidence(SETUP, [HostCpu("a", threads=2, cores=2, ranks=2)], {}, {}, SEEN)

LATE = {"ready_ms": [99, 98, 97, 96]}
ONE_BUCKET = {"buckets": [[3, 2, 1, 0]]}
# Registered so that the bucket that is sent first is ready after the next one.
REVERSED = {"buckets": [[1], [3, 2], [0]], "rebuilt": False}
UNUSED = {"find_unused_parameters": True}
BUFFERS = {"broadcast_buffers": True, "buffer_bytes": 4000}
THREADS = {"hosts": [HostCpu("a", 2, 2, 2), HostCpu("b", 12, 8, 4), HostCpu("c", 16, 8, 4)]}
INTERFACE = {"network_findings": {"slow_interface": "eth0 reaches 1 Gbit/s; set GLOO_SOCKET_IFNAME=ib0"}}


def one_queue(value):
    """The last rank of the last host has it."""
    return {"hosts": [HostCpu("a", 2, 2, 2, [None, None]), HostCpu("b", 2, 2, 2, [None, value])]}


def cost(name, ms, low_ms):
    return {"costs": {name: Estimate(ms, low_ms, 2 * ms - low_ms)}}


def found(**changes):
    """The mistakes of the training with changes to its setup, to what was seen, or to the evidence as a whole."""

    def changed(usual):
        names = changes.keys() & {field.name for field in dataclasses.fields(usual)}
        return dataclasses.replace(usual, **{name: changes.pop(name) for name in names})

    known = changed(dataclasses.replace(KNOWN, setup=changed(SETUP), layout=changed(SEEN)))
    assert not changes
    return mistakes(known)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"layout": None}, {}),
        (LATE | {"compiled": True}, {"whole_graph_compiled": None}),
        (LATE, {"gradients_at_the_end": None}),
        (LATE | {"compiled": True} | cost("whole_graph_compiled", 1, -1), {}),  # it costs nothing
        ({"compiled": True}, {}),  # gradients come one after the other all the same
        (ONE_BUCKET | cost("late_first_bucket", 20, 18), {"late_first_bucket": 20}),
        (REVERSED | cost("parameter_order", 30, 28), {"parameter_order": 30}),
        (REVERSED | {"rebuilt": True}, {}),
        (UNUSED, {"find_unused_parameters": None}),
        (UNUSED | cost("find_unused_parameters", 0.2, -1), {}),  # within the noise
        (BUFFERS | cost("broadcast_buffers", 5, 4), {"broadcast_buffers": 5}),
        (BUFFERS | {"buffer_bytes": 0}, {}),  # no buffers, nothing is sent
        (BUFFERS | {"broadcast_buffers": False}, {}),
        (THREADS, {"threads": None}),
        ({"hosts": [HostCpu("a", threads=8, cores=8, ranks=2)]}, {}),
        (INTERFACE, {"interface": None}),
        (INTERFACE | cost("interface", 30, 28), {"interface": 30}),
        (INTERFACE | cost("interface", 1, -1), {}),  # hidden behind backward
        ({"network_findings": {"slow_host": "host1 is slow"}}, {}),
        (one_queue("1") | {"device": "cuda"}, {"cuda_connections": None}),
        (one_queue("1"), {}),
        (one_queue("8") | {"device": "cuda"}, {}),
        # The costliest comes first, and what has no cost last.
        (
            UNUSED | BUFFERS | THREADS | {"costs": {name: Estimate(ms, ms, ms) for name, ms in
             (("find_unused_parameters", 3), ("broadcast_buffers", 7))}},
            {"broadcast_buffers": 7, "find_unused_parameters": 3, "threads": None},
        ),
    ],
)  # fmt: skip
def test_each_mistake_is_found_if_it_is_there_and_costs_something(changes, expected):
    assert [(each.key, each.cost_ms) for each in found(**changes)] == list(expected.items())


@pytest.mark.parametrize(
    ("changes", "title", "remedy"),
    [
        (LATE | {"compiled": True}, "the whole model is compiled", "block.compile()"),
        (ONE_BUCKET, "(of 1) is ready after 100% of backward", "bucket_cap_mb=4)"),
        (REVERSED, "waits 25.0 ms", "omit find_unused_parameters"),
        (BUFFERS, "4000 bytes", "broadcast_buffers=False"),
        (THREADS, "on c, 16 threads compute on 8 cores", "OMP_NUM_THREADS=2"),
        ({"hosts": [HostCpu("a", threads=8, cores=1, ranks=4)]}, "", "OMP_NUM_THREADS=1, and fewer ranks per host"),
        # One thread each is what they have.
        ({"hosts": [HostCpu("a", threads=4, cores=1, ranks=4)]}, "", "fewer ranks per host"),
        (INTERFACE, "not the best one", INTERFACE["network_findings"]["slow_interface"]),
        (one_queue("1") | {"device": "cuda"}, "on b:", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_a_mistake_says_what_is_wrong_and_how_to_fix_it(changes, title, remedy):
    (each,) = found(**changes)
    assert title in each.title
    assert remedy in each.remedy
    assert "OMP" in remedy or "OMP" not in each.remedy


def test_where_one_host_has_too_many_threads_every_rank_takes_part():
    doctor = pytest.importorskip("gradcast.diagnosis.doctor", exc_type=ImportError)
    many, few, one = (process(range(4), threads=threads) for threads in (4, 3, 1))
    for processes, expected in (
        ((many, many, few), [2, 2, 3]),
        ((few, few, few), [2, 2, 3]),
        ((one, one, few), [None] * 3),
    ):
        assert [doctor.own_fitting_threads("aab", rank, processes) for rank in range(3)] == expected


# --- Cores ---


def process(cores, threads=4, quota=None, cgroup="a"):
    return Process(None, threads, frozenset(cores), quota, cgroup)


@pytest.mark.parametrize(
    ("processes", "cores"),
    [
        ([process(range(8)), process(range(8))], 8),
        ([process(range(4)), process(range(4, 8))], 8),
        ([process(range(8), quota=2.5), process(range(8), quota=2.5)], 2),  # one group, one limit
        ([process(range(8), quota=2.0), process(range(8), quota=2.0, cgroup="b")], 4),
        ([process(range(8), quota=2.0), process(range(8), cgroup="b")], 8),
        ([process(range(8), quota=0.5)], 1),
    ],
)
def test_cores_that_ranks_share(processes, cores):
    assert usable_cores(processes) == cores
    (host,) = environment.hosts(["a"] * len(processes), processes)
    assert (host.threads, host.cores, host.ranks) == (4 * len(processes), cores, len(processes))


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path):
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    assert environment.quota(tmp_path, "0::/job/step") == 4
    assert environment.quota(tmp_path, "0::/") is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert environment.quota(tmp_path, "0::/job/step") == 1.5


@pytest.mark.parametrize(("quota_us", "cores"), [(200_000, 2), (-1, None)])
def test_the_first_version_of_control_groups(tmp_path, quota_us, cores):
    (tmp_path / "cpu").mkdir()
    for name, value in (("quota", quota_us), ("period", 100_000)):
        (tmp_path / "cpu" / f"cpu.cfs_{name}_us").write_text(f"{value}\n")
    assert environment.quota(tmp_path, "4:cpu:/job") == cores


def test_what_a_process_says_of_itself(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
    own = environment.own_process()
    assert own.cuda_connections == "3"
    assert own.cores
    assert own.threads >= 1
    if Path("/proc/self/ns/cgroup").exists():  # tells containers apart that see their own group as the root
        assert own.cgroup.startswith("cgroup:[")
