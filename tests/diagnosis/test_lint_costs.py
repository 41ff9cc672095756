"""The cost of misconfigurations, by `play` and from measurements of the ranks."""

import dataclasses
import types

import pytest

import gradcast
from gradcast import _core
from gradcast.diagnosis.analyze import lint_costs, result
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.step_breakdown import Breakdown, RankSteps
from gradcast.diagnosis.observe.environment import Process

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
    """The buckets made here are those of the core's ddp policy, so the predictions agree."""
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
    """``without_ms`` has the steps without each option."""
    steps = {"step": [30.0]}
    probes = {"cluster": {"step": cluster_ms}}
    process_ = Process(variables or {}, threads, frozenset(range(4)), None, "a")
    return result.RankMeasurements(
        steps=RankSteps(rank=rank, node="ab".index(host), host=host, normal=steps, probes=probes, computing={}),
        options=without_ms,
        trial=None,
        clocks=[],
        network=None,
        launch_unknown=None,
        probe_steps=0,
        process=process_,
    )


WITHOUT = {"find_unused_parameters": [27.0] * 5, "broadcast_buffers": [24.0] * 5}
FACTS = result.TrainingSetup(
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
    warmup_steps=5,
    gradients_used=False,
)
BREAKDOWN = Breakdown(step=Estimate(100.0, 100.0, 100.0), parts={}, ranks=[], view_rank=0, straggler=None)


def linted(ranks, facts=FACTS, known=None):
    return {each["key"]: each for each in result._lint(ranks, facts, BREAKDOWN, known)}


def two_ranks(**changes):
    """The second rank is on another host and has ``changes``."""
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
    cost = result.option_cost(ranks, "find_unused_parameters")
    assert cost.value == 5  # 40 less 35
    assert 2 < cost.low <= 5 <= cost.high < 8
    assert result.option_cost(ranks, "broadcast_buffers") is None


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
    assert doctor._rebuilds_buckets(ddp) is rebuilds


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
