"""The lint of usual mistakes: each is found where it is, and nowhere else. Pure, on facts made by hand."""

import dataclasses
import types
from pathlib import Path

import pytest

import gradcast
from gradcast import _core
from gradcast.diagnosis import environment, lint_costs
from gradcast.diagnosis import findings as doctors
from gradcast.diagnosis.environment import Process, usable_cores
from gradcast.diagnosis.estimates import Estimate
from gradcast.diagnosis.lint import Facts, Host, findings
from gradcast.diagnosis.stalls import Breakdown, RankSteps

# Four parameters whose gradients come one after the other, the last one registered first.
STREAMING = Facts(
    ready_ms=[100, 75, 50, 25],
    backward_ms=100,
    step_ms=200,
    buckets=[[3, 2], [1, 0]],
    compiled=False,
    find_unused_parameters=False,
    rebuilt=True,
    broadcast_buffers=False,
    device="cpu",
    hosts=[Host("a", threads=2, cores=2, ranks=2)],
)
AT_THE_END = {"ready_ms": [99, 98, 97, 96], "predicted_ms": 220, "predicted_even_ms": 180}


def found(**changes):
    return {each.key: each for each in findings(dataclasses.replace(STREAMING, **changes))}


def test_a_training_without_mistakes_has_none():
    assert found() == {}


def test_nothing_is_found_where_nothing_is_known():
    assert findings(Facts()) == []


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
        return found(hosts=[Host("a", **host)])["threads"].remedy

    assert remedy(threads=16, cores=8, ranks=2) == "OMP_NUM_THREADS=4"
    assert remedy(threads=8, cores=1, ranks=4) == "OMP_NUM_THREADS=1, and fewer ranks per host"
    assert remedy(threads=4, cores=1, ranks=4) == "fewer ranks per host"  # one thread each is what they have
    assert found(hosts=[Host("a", threads=8, cores=8, ranks=2)]) == {}


def test_what_more_threads_than_cores_cost():
    hosts = [Host("a", threads=16, cores=8, ranks=2)]
    assert found(hosts=hosts)["threads"].cost_ms is None
    assert found(hosts=hosts, threads_cost=Estimate(4.0, 3.0, 5.0))["threads"].cost_ms == 4.0
    assert "threads" not in found(hosts=hosts, threads_cost=Estimate(1.0, -1.0, 3.0)), "within the noise"


@pytest.mark.parametrize(
    ("threads", "cores", "ranks", "fitting"), [(16, 8, 2, 4), (8, 1, 4, 1), (4, 1, 4, None), (8, 8, 2, None)]
)
def test_the_threads_that_fit(threads, cores, ranks, fitting):
    assert Host("a", threads, cores, ranks).fitting_threads == fitting


def test_where_one_host_has_too_many_threads_every_rank_takes_part():
    doctor = pytest.importorskip("gradcast.diagnosis.doctor", exc_type=ImportError)
    nodes = doctor.Nodes(("a", "a", "b"))
    many, few = process(range(4), threads=4), process(range(4), threads=3)
    assert [doctor._fitting_threads(nodes, rank, [many, many, few]) for rank in range(3)] == [2, 2, 3]
    assert [doctor._fitting_threads(nodes, rank, [few, few, few]) for rank in range(3)] == [2, 2, 3]
    one = process(range(4), threads=1)
    assert [doctor._fitting_threads(nodes, rank, [one, one, few]) for rank in range(3)] == [None] * 3


def test_the_host_with_too_many_threads_is_named():
    hosts = [Host("a", 2, 2, 2), Host("b", 12, 8, 4), Host("c", 16, 8, 4)]
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
        usual = Host("a", 2, 2, 2, [{}, {}])
        return [usual, dataclasses.replace(usual, name="b", variables=[{}, {"CUDA_DEVICE_MAX_CONNECTIONS": value}])]

    (each,) = found(hosts=hosts("1"), device="cuda").values()
    assert each.key == "cuda_connections"
    assert "on b:" in each.title
    assert found(hosts=hosts("1"), device="cpu") == {}
    assert found(hosts=hosts("8"), device="cuda") == {}


def test_the_costliest_comes_first_and_what_has_no_cost_last():
    listed = findings(
        dataclasses.replace(
            STREAMING,
            hosts=[Host("a", threads=9, cores=2, ranks=2)],
            find_unused_parameters=True,
            all_used=True,
            find_unused_cost=Estimate(3.0, 2.0, 4.0),
            broadcast_buffers=True,
            buffer_bytes=100,
            broadcast_cost=Estimate(7.0, 6.0, 8.0),
        )
    )
    assert [each.key for each in listed] == ["broadcast_buffers", "find_unused_parameters", "threads"]


# --- What mistakes cost, by `play` ---

MIB = 1 << 20
CAPS = (4 * MIB, 4 * MIB)


def profile(ready_ms=(40, 30, 20, 10)):
    tensors = [
        _core.Tensor(name=f"layer{index}", bytes=4 * MIB, ready_ns=ready * 1e6, need_ns=index * 5e6)
        for index, ready in enumerate(ready_ms)
    ]
    piece = _core.LinkPiece(alpha_ns=0, beta_ns_per_byte=10e6 / (4 * MIB))  # 10 ms for each tensor
    link = _core.LinkModel(all_reduce=[piece])
    return _core.Profile(name="even", forward_ns=20e6, backward_ns=40e6, tensors=tensors, world_size=2, link=link)


REGISTERED = [f"layer{index}" for index in range(4)]


def test_registered_as_used_both_orders_cost_the_same():
    costs = lint_costs.predictions(profile(), REGISTERED, CAPS, rebuilt=False)
    # The last gradient is ready at 40 ms and takes 10; then forward.
    assert costs.predicted_ms == costs.predicted_used_ms == pytest.approx(70)


def test_registered_the_other_way_round_every_bucket_waits_for_the_last():
    costs = lint_costs.predictions(profile(), REGISTERED[::-1], CAPS, rebuilt=False)
    # All four go after backward, 10 ms each.
    assert costs.predicted_ms == pytest.approx(100)
    assert costs.predicted_used_ms == pytest.approx(70)
    # What other mistakes would cost does not hold what this one does: the order stays.
    assert costs.predicted_even_ms == costs.predicted_best_buckets_ms == pytest.approx(100)
    assert lint_costs.predictions(profile(), REGISTERED[::-1], CAPS, rebuilt=True).predicted_ms == pytest.approx(70)


def test_gradients_that_all_come_at_the_end_cost_what_they_could_hide():
    costs = lint_costs.predictions(profile((40, 40, 40, 40)), REGISTERED, CAPS, rebuilt=True)
    assert costs.predicted_ms == pytest.approx(100)
    assert costs.predicted_even_ms == pytest.approx(70)


def test_one_bucket_for_all_costs_what_smaller_ones_would_hide():
    costs = lint_costs.predictions(profile(), REGISTERED, (64 * MIB, 64 * MIB), rebuilt=True)
    assert costs.predicted_ms == pytest.approx(100)
    assert costs.predicted_best_buckets_ms == pytest.approx(70)
    assert costs.best_cap_mib <= 4


def test_a_better_interface_makes_what_travels_shorter():
    costs = lint_costs.predictions(profile(), REGISTERED, CAPS, rebuilt=True, interface_gain=2.0)
    assert costs.predicted_interface_ms == pytest.approx(65)  # the last of them takes 5 ms, not 10
    assert lint_costs.predictions(profile(), REGISTERED, CAPS, rebuilt=True).predicted_interface_ms is None


@pytest.mark.parametrize(
    ("kinds", "caps_mib"),
    [("aaaaaaaa", (1, 4)), ("abababab", (1, 4)), ("aabbaaab", (2, 2)), ("abcabcab", (1, 25)), ("a", (1, 1))],
)
def test_buckets_that_are_not_laid_out_anew_are_torchs(kinds, caps_mib):
    torch = pytest.importorskip("torch")
    dtypes = {"a": torch.float32, "b": torch.float64, "c": torch.float16}
    tensors = [torch.empty(MIB // dtypes[kind].itemsize, dtype=dtypes[kind]) for kind in kinds]
    caps = tuple(cap * MIB for cap in caps_mib)
    torchs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, list(caps))
    own = _core.Profile(
        name="kinds",
        forward_ns=1e6,
        backward_ns=1e6,
        tensors=[
            _core.Tensor(name=f"{index}", bytes=MIB, ready_ns=0, need_ns=index, buffer="abc".index(kind))
            for index, kind in enumerate(kinds)
        ],
    )
    names = [f"{index}" for index in range(len(kinds))]
    found = lint_costs.buckets(own, names, caps, rebuilt=False)
    assert [[int(own.tensors[index].name) for index in bucket] for bucket in found] == torchs[::-1]


def test_registered_as_it_is_used_a_real_model_costs_what_the_policy_says():
    """The buckets made here are those of the core's policy: its prediction is the same."""
    known = gradcast.load_profile("bert_base")
    link = _core.ring_link(_core.Hop(latency_ns=50e3, bandwidth_bytes_per_s=1e9), 8)
    own = _core.Profile(
        name=known.name, forward_ns=known.forward_ns, backward_ns=known.backward_ns, tensors=known.tensors, link=link
    )
    caps = (MIB, 25 * MIB)
    laid_out = lint_costs.buckets(own, [], caps, rebuilt=True)
    costs = lint_costs.predictions(own, [], caps, rebuilt=True)
    assert lint_costs._laid_out_ms(own, laid_out) == pytest.approx(costs.predicted_ms, rel=1e-3)


# --- From what the ranks have measured to the lint ---


def measured(rank, host, *, cluster_ms, without_ms, threads=1, variables=None):
    """``without_ms``: by option, steps without it."""
    steps = {"step": [30.0]}
    probes = {"cluster": {"step": cluster_ms}}
    process_ = Process(variables or {}, threads, frozenset(range(4)), None, "a")
    return doctors.Measured(
        steps=RankSteps(rank=rank, node="ab".index(host), host=host, normal=steps, probes=probes),
        options=without_ms,
        trial=None,
        clocks=[],
        network=None,
        probe_steps=0,
        process=process_,
    )


WITHOUT = {"find_unused_parameters": [27.0] * 5, "broadcast_buffers": [24.0] * 5}
FACTS = doctors.Facts(
    backend="gloo",
    device="cuda",
    torch="2.11",
    model="Net",
    parameter_bytes=dict.fromkeys(REGISTERED[::-1], 4 * MIB),
    caps_bytes=CAPS,
    is_fp32=True,
    compiled=False,
    find_unused_parameters=True,
    rebuilt=False,
    broadcast_buffers=True,
    buffer_bytes=4000,
    left_out_steps=5,
)
BREAKDOWN = Breakdown(step=Estimate(100.0, 100.0, 100.0), parts={}, ranks=[], view_rank=0, straggler=None)


def linted(ranks, facts=FACTS, known=None):
    return {each["key"]: each for each in doctors._lint(ranks, facts, BREAKDOWN, known)}


def two_ranks(**changes):
    """The second is on another host and is what ``changes`` says."""
    common = {"cluster_ms": [30.0] * 5, "without_ms": WITHOUT}
    return [measured(0, "a", **common), measured(1, "b", **common | changes)]


def test_each_option_has_its_own_cost():
    found = linted(two_ranks())
    assert found["find_unused_parameters"]["cost_ms"] == 3
    assert found["broadcast_buffers"]["cost_ms"] == 6
    assert set(found) == {"find_unused_parameters", "broadcast_buffers"}


def test_an_option_costs_what_the_slowest_ranks_differ_by():
    without = {"find_unused_parameters": [34.0, 35.0, 36.0]}
    ranks = [measured(0, "a", cluster_ms=[30.0, 32.0, 31.0], without_ms={"find_unused_parameters": [10.0] * 3})]
    ranks.append(measured(1, "b", cluster_ms=[40.0, 39.0, 41.0], without_ms=without))
    cost = doctors.option_cost(ranks, "find_unused_parameters")
    assert cost.value == 5  # 40 less 35
    assert 2 < cost.low <= 5 <= cost.high < 8
    assert doctors.option_cost(ranks, "broadcast_buffers") is None


def test_the_order_of_registration_costs_only_where_ddp_keeps_it():
    found = linted(two_ranks(), known=profile())
    assert found["parameter_order"]["cost_ms"] == pytest.approx(30)
    assert "parameter_order" not in linted(two_ranks(), dataclasses.replace(FACTS, rebuilt=True), profile())


@pytest.mark.parametrize(
    ("static_graph", "find_unused_parameters", "rebuilds"),
    [(False, False, True), (False, True, False), (True, False, True), (True, True, True)],
)
def test_ddp_lays_its_buckets_out_anew_unless_it_looks_for_unused_parameters(
    static_graph, find_unused_parameters, rebuilds
):
    doctor = pytest.importorskip("gradcast.diagnosis.doctor", exc_type=ImportError)
    ddp = types.SimpleNamespace(static_graph=static_graph, find_unused_parameters=find_unused_parameters)
    assert doctor._rebuilds(ddp) is rebuilds


def test_every_host_and_every_rank_is_looked_at():
    found = linted(two_ranks(threads=16, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    assert found["threads"]["title"].startswith("on b, 16 threads compute on 4 cores")
    assert "on b:" in found["cuda_connections"]["title"]


def test_another_interface_costs_what_play_says_of_its_measured_rate():
    network = {
        "findings": [{"key": "slow_interface", "sentence": "set it"}],
        "pairs": [],
        "alternatives": [
            {"interface": "eth1", "gbit_per_s": 1.0, "chosen_gbit_per_s": 1.0},
            {"interface": "ib0", "gbit_per_s": 2.0, "chosen_gbit_per_s": 1.0},
        ],
    }
    ranks = two_ranks()
    ranks[0] = dataclasses.replace(ranks[0], network=network)
    facts = dataclasses.replace(FACTS, rebuilt=True)
    assert linted(ranks, facts, profile())["interface"]["cost_ms"] == pytest.approx(5)
    assert linted(ranks, facts)["interface"]["cost_ms"] is None


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
