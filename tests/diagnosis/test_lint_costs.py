"""The cost of misconfigurations, by `play` and from measurements of the ranks."""

import dataclasses

import pytest

from diagnosis import doctor_runs
from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze import lint_costs, result
from gradcast.diagnosis.analyze.measurements import option_costs
from gradcast.diagnosis.analyze.step_breakdown import RankSteps

MIB = 1 << 20
CAPS = (4 * MIB, 4 * MIB)
REGISTERED = [f"layer{index}" for index in range(4)]


def profile(ready_ms=(40, 30, 20, 10)):
    tensors = [
        _core.Tensor(name=name, bytes=4 * MIB, ready_ns=ready * 1e6, need_ns=index * 5e6)
        for index, (name, ready) in enumerate(zip(REGISTERED, ready_ms, strict=True))
    ]
    piece = _core.LinkPiece(alpha_ns=0, beta_ns_per_byte=10e6 / (4 * MIB))  # 10 ms for each tensor
    link = _core.LinkModel(all_reduce=[piece])
    return _core.Profile(name="even", forward_ns=20e6, backward_ns=40e6, tensors=tensors, world_size=2, link=link)


def facts(registered=REGISTERED, **changes):
    return doctor_runs.setup(parameter_bytes=dict.fromkeys(registered, 4 * MIB), **{"caps_bytes": CAPS, **changes})


EVEN, AT_THE_END = (40, 30, 20, 10), (40, 40, 40, 40)
ORDER, LATE, BUCKET = "parameter_order", "gradients_at_the_end", "late_first_bucket"


@pytest.mark.parametrize(
    ("ready_ms", "setup", "interface_gain", "expected"),
    [
        # The last gradient is ready at 40 ms and takes 10; then forward: 70 ms.
        (EVEN, facts(rebuilt=False), None, {ORDER: 0}),
        # All four go after backward, 10 ms each: 100 ms; with what other mistakes would cost, the order stays.
        (EVEN, facts(REGISTERED[::-1], rebuilt=False), None, {ORDER: 30, LATE: 0, BUCKET: 0}),
        (EVEN, facts(REGISTERED[::-1]), None, {BUCKET: 0}),
        (AT_THE_END, facts(), None, {LATE: 30, "whole_graph_compiled": 30}),
        (EVEN, facts(caps_bytes=(64 * MIB, 64 * MIB)), None, {BUCKET: 30}),
        # With a better interface the last of them takes 5 ms, not 10, wherever DDP's buckets come from.
        (EVEN, facts(rebuilt=True), 2.0, {"interface": 5}),
        (EVEN, facts(rebuilt=False), 2.0, {"interface": 5}),
    ],
)
def test_a_mistake_costs_what_would_be_hidden_without_it(ready_ms, setup, interface_gain, expected):
    layout, costs = lint_costs.predicted(profile(ready_ms), setup, 200, interface_gain)
    assert {key: costs[key].value for key in expected} == pytest.approx(expected, abs=1e-9)
    # A prediction is off by a hundredth of the step.
    assert all(each.value - each.low == each.high - each.value == pytest.approx(2) for each in costs.values())
    assert ("interface" in costs) == (interface_gain is not None)
    assert layout.best_cap_mib <= 4


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
    known = doctor_runs.with_link(doctor_runs.scene(8, "bert_base"))
    laid_out = lint_costs.buckets(known, [], (MIB, 25 * MIB), rebuilt=True)
    ddp_ms = ddp_baseline.plan(known, (MIB, 25 * MIB)).predicted_ns / 1e6
    assert lint_costs.laid_out_ms(known, laid_out) == pytest.approx(ddp_ms, rel=1e-3)


# --- From what the ranks have measured to the lint ---

MISTAKEN = facts(REGISTERED[::-1], device="cuda", find_unused_parameters=True, rebuilt=False, broadcast_buffers=True)


def rank(number, cluster_ms, **changes):
    """Rank 0 is on host a, rank 1 on host b."""
    steps = RankSteps(number, "ab"[number], {"step": [30.0]}, {"cluster": {"step": cluster_ms}}, computing={})
    return doctor_runs.measured(steps, **changes)


def two_ranks(first=(), second=()):
    """Without their options, steps of 30 ms take 27 and 24."""
    options = {"find_unused_parameters": [27.0] * 5, "broadcast_buffers": [24.0] * 5}
    return [rank(number, [30.0] * 5, options=options, **dict(each)) for number, each in enumerate((first, second))]


def linted(ranks, setup=MISTAKEN, known=None):
    return {each.key: each for each in result.lint_of(ranks, setup, 100.0, known)}


def test_each_option_has_its_own_cost():
    costs = {key: each.cost_ms for key, each in linted(two_ranks()).items()}
    assert costs == {"broadcast_buffers": 6, "find_unused_parameters": 3}


def test_an_option_costs_what_the_slowest_ranks_differ_by():
    ranks = [
        rank(0, [30.0, 32.0, 31.0], options={"threads": [10.0] * 3}),
        rank(1, [40.0, 39.0, 41.0], options={"threads": [34.0, 35.0, 36.0]}),
    ]
    (cost,) = option_costs(ranks).values()
    assert cost.value == 5  # 40 less 35
    assert 2 < cost.low <= 5 <= cost.high < 8


def test_every_host_and_every_rank_is_looked_at():
    process = dataclasses.replace(two_ranks()[0].process, threads=16, cuda_connections="1")
    found = linted(two_ranks(second={"process": process}))
    assert found["threads"].title.startswith("on b, 16 threads compute on 4 cores")
    assert "on b:" in found["cuda_connections"].title


def test_another_interface_costs_what_play_says_of_its_measured_rate():
    rates = {"eth1": 1.0, "ib0": 2.0}
    network = {
        "findings": [{"key": "slow_interface", "sentence": "set it"}],
        "alternatives": [
            {"interface": name, "gbit_per_s": rate, "chosen_gbit_per_s": 1.0} for name, rate in rates.items()
        ],
    }
    ranks = two_ranks({"network": network})
    assert linted(ranks, facts(), profile())["interface"].cost_ms == pytest.approx(5)
    assert linted(ranks, facts())["interface"].cost_ms is None
