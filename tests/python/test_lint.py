"""The lint of usual mistakes: each is found where it is, and nowhere else. Pure, on facts made by hand."""

import dataclasses

import pytest

import gradcast
from gradcast import _core
from gradcast.diagnosis import environment, lint_costs
from gradcast.diagnosis.environment import Process, usable_cores
from gradcast.diagnosis.estimates import Estimate
from gradcast.diagnosis.lint import Facts, findings

# Four parameters whose gradients come one after the other, the last one registered first.
STREAMING = Facts(
    ready_ms=[100, 75, 50, 25],
    backward_ms=100,
    step_ms=200,
    buckets=[[3, 2], [1, 0]],
    compiled=False,
    find_unused_parameters=False,
    broadcast_buffers=False,
    device="cpu",
    threads=2,
    cores=2,
    ranks_per_host=2,
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
    each = found(buckets=[[3, 2, 1, 0]], predicted_ms=210, predicted_best_buckets_ms=190)["late_first_bucket"]
    assert each.cost_ms == 20
    assert "(of 1) is ready after 100% of backward" in each.title
    assert "bucket_cap_mb" in each.remedy


def test_parameters_in_another_order_than_used():
    # Registered so that the bucket that is sent first is ready last.
    changes = {"buckets": [[0], [3, 2, 1]], "find_unused_parameters": True}
    each = found(**changes, predicted_registered_ms=230, predicted_used_ms=200)["parameter_order"]
    assert each.cost_ms == 30
    assert "waits 25.0 ms" in each.title
    assert "parameter_order" not in found(**changes, predicted_registered_ms=201, predicted_used_ms=200)
    assert found(**changes)["parameter_order"].cost_ms is None


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
    each = found(threads=16, cores=8, ranks_per_host=2)["threads"]
    assert each.remedy == "OMP_NUM_THREADS=4"
    assert found(threads=8, cores=8) == {}
    assert found(threads=4, cores=1, ranks_per_host=4)["threads"].remedy == "OMP_NUM_THREADS=1"


def test_the_wrong_interface_comes_from_the_network_check():
    sentence = "eth0 reaches 1 Gbit/s; set GLOO_SOCKET_IFNAME=ib0"
    assert found(network_findings={"slow_interface": sentence})["interface"].remedy == sentence
    assert found(network_findings={"slow_host": "host1 is slow"}) == {}


def test_one_queue_to_the_gpu_matters_on_a_gpu():
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert set(found(environment=variables, device="cuda")) == {"cuda_connections"}
    assert found(environment=variables, device="cpu") == {}
    assert found(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, device="cuda") == {}


def test_the_costliest_comes_first_and_what_has_no_cost_last():
    listed = findings(
        dataclasses.replace(
            STREAMING,
            threads=9,
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
    assert costs.predicted_ms == costs.predicted_registered_ms == costs.predicted_used_ms == pytest.approx(70)


def test_registered_the_other_way_round_every_bucket_waits_for_the_last():
    costs = lint_costs.predictions(profile(), REGISTERED[::-1], CAPS, rebuilt=False)
    # All four go after backward, 10 ms each.
    assert costs.predicted_registered_ms == pytest.approx(100)
    assert costs.predicted_ms == costs.predicted_registered_ms
    assert lint_costs.predictions(profile(), REGISTERED[::-1], CAPS, rebuilt=True).predicted_ms == pytest.approx(70)


def test_gradients_that_all_come_at_the_end_cost_what_they_could_hide():
    costs = lint_costs.predictions(profile((40, 40, 40, 40)), REGISTERED, CAPS, rebuilt=True)
    assert costs.predicted_ms == pytest.approx(100)
    assert costs.predicted_even_ms == pytest.approx(70)


def test_one_bucket_for_all_costs_what_smaller_ones_would_hide():
    costs = lint_costs.predictions(profile(), REGISTERED, (64 * MIB, 64 * MIB), rebuilt=True)
    assert costs.predicted_ms == pytest.approx(100)
    assert costs.predicted_best_buckets_ms == pytest.approx(70)


def test_registered_as_it_is_used_a_real_model_costs_what_the_policy_says():
    """The buckets made here are those of the core's policy: its prediction is the same."""
    known = gradcast.load_profile("bert_base")
    link = _core.ring_link(_core.Hop(latency_ns=50e3, bandwidth_bytes_per_s=1e9), 8)
    own = _core.Profile(
        name=known.name, forward_ns=known.forward_ns, backward_ns=known.backward_ns, tensors=known.tensors, link=link
    )
    order = [tensor.name for tensor in sorted(known.tensors, key=lambda each: -each.ready_ns)]
    costs = lint_costs.predictions(own, order, (MIB, 25 * MIB), rebuilt=True)
    assert costs.predicted_registered_ms == pytest.approx(costs.predicted_used_ms, rel=1e-3)


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
    facts = environment.facts_of_environment(processes)
    assert (facts.threads, facts.ranks_per_host) == (4 * len(processes), len(processes))


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
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    own = environment.own_process()
    assert own.variables["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in own.variables
    assert own.cores
    assert own.threads >= 1
