"""Misconfigurations: each is found if it is present, and only then. Pure, on hand-made evidence."""

import dataclasses
from pathlib import Path

import pytest

from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.lint import Evidence, mistakes
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.observe.environment import HostCpu, Process, usable_cores

# Four parameters whose gradients come one after the other, the last one registered first.
STREAMING = Evidence(
    ready_ms=[100, 75, 50, 25],
    backward_ms=100,
    step_ms=200,
    buckets=[[3, 2], [1, 0]],
    compiled=False,
    find_unused_parameters=False,
    rebuilt=True,
    broadcast_buffers=False,
    device="cpu",
    hosts=[HostCpu("a", threads=2, cores=2, ranks=2)],
)
AT_THE_END = {"ready_ms": [99, 98, 97, 96], "predicted_ms": 220, "predicted_even_ms": 180}


def found(**changes):
    return {each.key: each for each in mistakes(dataclasses.replace(STREAMING, **changes))}


def test_a_training_without_mistakes_has_none():
    assert found() == {}


def test_nothing_is_found_where_nothing_is_known():
    assert mistakes(Evidence()) == []


def test_a_model_compiled_as_a_whole():
    each = found(compiled=True, **AT_THE_END)["whole_graph_compiled"]
    assert each.cost_ms == 40
    assert "block.compile()" in each.remedy
    assert found(compiled=True) == {}  # gradients come one after the other all the same


def test_gradients_that_all_come_late_for_another_reason():
    assert set(found(**AT_THE_END)) == {"gradients_at_the_end"}


def test_a_mistake_that_costs_nothing_is_none():
    assert found(compiled=True, **AT_THE_END | {"predicted_even_ms": 219}) == {}


def test_a_cost_that_is_not_known_stays_unknown():
    each = found(compiled=True, ready_ms=[99, 98, 97, 96])["whole_graph_compiled"]
    assert each.cost_ms is None


def test_a_first_bucket_that_is_ready_late():
    changes = {"buckets": [[3, 2, 1, 0]], "predicted_ms": 210, "predicted_best_buckets_ms": 190, "best_cap_mib": 4}
    each = found(**changes)["late_first_bucket"]
    assert each.cost_ms == 20
    assert "(of 1) is ready after 100% of backward" in each.title
    assert "bucket_cap_mb=4)" in each.remedy
    assert "bucket_cap_mb=...)" in found(buckets=[[3, 2, 1, 0]])["late_first_bucket"].remedy


def test_parameters_in_another_order_than_used():
    # Registered so that the bucket that is sent first is ready last.
    changes = {"buckets": [[0], [3, 2, 1]], "rebuilt": False}
    each = found(**changes, predicted_ms=230, predicted_used_ms=200)["parameter_order"]
    assert each.cost_ms == 30
    assert "waits 25.0 ms" in each.title
    assert "parameter_order" not in found(**changes, predicted_ms=201, predicted_used_ms=200)
    assert found(**changes)["parameter_order"].cost_ms is None
    assert "parameter_order" not in found(**changes | {"rebuilt": True})
    assert "parameter_order" not in found(**changes | {"rebuilt": None})


def test_find_unused_parameters_without_need():
    cost = Estimate(3.0, 2.0, 4.0)
    each = found(find_unused_parameters=True, all_used=True, find_unused_cost=cost)["find_unused_parameters"]
    assert each.cost_ms == 3
    assert found(find_unused_parameters=True, all_used=False, find_unused_cost=cost) == {}
    assert found(find_unused_parameters=True) == {}  # whether it is needed is not known
    noise = Estimate(0.2, -1.0, 1.4)
    assert found(find_unused_parameters=True, all_used=True, find_unused_cost=noise) == {}


def test_buffers_sent_each_step():
    each = found(broadcast_buffers=True, buffer_bytes=4000, broadcast_cost=Estimate(5.0, 4.0, 6.0))["broadcast_buffers"]
    assert each.cost_ms == 5
    assert "4000 bytes" in each.title
    assert found(broadcast_buffers=True, buffer_bytes=0) == {}  # no buffers, nothing is sent
    assert found(broadcast_buffers=False, buffer_bytes=4000) == {}


def test_more_threads_than_cores():
    def remedy(**host):
        return found(hosts=[HostCpu("a", **host)])["threads"].remedy

    assert remedy(threads=16, cores=8, ranks=2) == "OMP_NUM_THREADS=4"
    assert remedy(threads=8, cores=1, ranks=4) == "OMP_NUM_THREADS=1, and fewer ranks per host"
    assert remedy(threads=4, cores=1, ranks=4) == "fewer ranks per host"  # one thread each is what they have
    assert found(hosts=[HostCpu("a", threads=8, cores=8, ranks=2)]) == {}


def test_what_more_threads_than_cores_cost():
    hosts = [HostCpu("a", threads=16, cores=8, ranks=2)]
    assert found(hosts=hosts)["threads"].cost_ms is None
    assert found(hosts=hosts, threads_cost=Estimate(4.0, 3.0, 5.0))["threads"].cost_ms == 4.0
    assert "threads" not in found(hosts=hosts, threads_cost=Estimate(1.0, -1.0, 3.0)), "within the noise"


@pytest.mark.parametrize(
    ("threads", "cores", "ranks", "fitting"), [(16, 8, 2, 4), (8, 1, 4, 1), (4, 1, 4, None), (8, 8, 2, None)]
)
def test_the_threads_that_fit(threads, cores, ranks, fitting):
    assert HostCpu("a", threads, cores, ranks).fitting_threads == fitting


def test_where_one_host_has_too_many_threads_every_rank_takes_part():
    doctor = pytest.importorskip("gradcast.diagnosis.doctor", exc_type=ImportError)
    nodes = doctor.RankNodes(("a", "a", "b"))
    many, few = process(range(4), threads=4), process(range(4), threads=3)
    assert [doctor._fitting_threads(nodes, rank, [many, many, few]) for rank in range(3)] == [2, 2, 3]
    assert [doctor._fitting_threads(nodes, rank, [few, few, few]) for rank in range(3)] == [2, 2, 3]
    one = process(range(4), threads=1)
    assert [doctor._fitting_threads(nodes, rank, [one, one, few]) for rank in range(3)] == [None] * 3


def test_the_host_with_too_many_threads_is_named():
    hosts = [HostCpu("a", 2, 2, 2), HostCpu("b", 12, 8, 4), HostCpu("c", 16, 8, 4)]
    title = found(hosts=hosts)["threads"].title
    assert title.startswith("on c, 16 threads compute on 8 cores")


def test_the_wrong_interface_comes_from_the_network_check():
    sentence = "eth0 reaches 1 Gbit/s; set GLOO_SOCKET_IFNAME=ib0"
    each = found(network_findings={"slow_interface": sentence})["interface"]
    assert (each.remedy, each.cost_ms) == (sentence, None)
    measured = {"network_findings": {"slow_interface": sentence}, "predicted_ms": 210}
    assert found(**measured, predicted_interface_ms=180)["interface"].cost_ms == 30
    assert found(**measured, predicted_interface_ms=209) == {}  # hidden behind backward: it costs nothing
    assert found(network_findings={"slow_host": "host1 is slow"}) == {}


def test_one_queue_to_the_gpu_matters_on_a_gpu():
    def hosts(value):
        """The last rank of the last host has it."""
        usual = HostCpu("a", 2, 2, 2, [{}, {}])
        return [usual, dataclasses.replace(usual, name="b", variables=[{}, {"CUDA_DEVICE_MAX_CONNECTIONS": value}])]

    (each,) = found(hosts=hosts("1"), device="cuda").values()
    assert each.key == "cuda_connections"
    assert "on b:" in each.title
    assert found(hosts=hosts("1"), device="cpu") == {}
    assert found(hosts=hosts("8"), device="cuda") == {}


def test_the_costliest_comes_first_and_what_has_no_cost_last():
    listed = mistakes(
        dataclasses.replace(
            STREAMING,
            hosts=[HostCpu("a", threads=9, cores=2, ranks=2)],
            find_unused_parameters=True,
            all_used=True,
            find_unused_cost=Estimate(3.0, 2.0, 4.0),
            broadcast_buffers=True,
            buffer_bytes=100,
            broadcast_cost=Estimate(7.0, 6.0, 8.0),
        )
    )
    assert [each.key for each in listed] == ["broadcast_buffers", "find_unused_parameters", "threads"]


# --- Cores ---


def process(cores, threads=4, quota=None, cgroup="a"):
    return Process({}, threads, frozenset(cores), quota, cgroup)


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
    host = environment.host("a", processes)
    assert (host.threads, host.cores, host.ranks) == (4 * len(processes), cores, len(processes))


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path):
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    assert environment.quota(tmp_path, "0::/job/step") == 4
    assert environment.quota(tmp_path, "0::/") is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert environment.quota(tmp_path, "0::/job/step") == 1.5


def test_the_first_version_of_control_groups(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert environment.quota(tmp_path, "4:cpu:/job") == 2
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert environment.quota(tmp_path, "4:cpu:/job") is None


def test_only_variables_that_the_lint_needs_are_read(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    own = environment.own_process()
    assert own.variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "3"}
    assert own.cores
    assert own.threads >= 1


@pytest.mark.skipif(not Path("/proc/self/ns/cgroup").exists(), reason="only Linux has namespaces of control groups")
def test_containers_that_see_their_own_group_as_the_root_are_told_apart():
    pytest.importorskip("torch")
    assert environment.own_process().cgroup.startswith("cgroup:[")
