"""Conclusions from measurements: actions, floor, bottleneck, and timelines."""

import dataclasses
import itertools

import pytest

import gradcast
from conftest import link_of
from diagnosis import doctor_runs
from gradcast.comparison import ddp_baseline, local_rounds, powersgd
from gradcast.diagnosis import runs
from gradcast.diagnosis.analyze import actions, timelines
from gradcast.diagnosis.analyze.actions import Situation
from gradcast.diagnosis.analyze.bottleneck import bottleneck
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.lint import Mistake
from gradcast.diagnosis.analyze.step_breakdown import ONE_SYNC, Breakdown, Straggler
from gradcast.diagnosis.runs import PARTS
from gradcast.diagnosis.trace.merged import BlockSpan, RankTrace, Span, Step
from gradcast.host_traffic import Hosts

MS = 1e6
SETUP = doctor_runs.setup()
ONE_EACH = Hosts.even(4, 1)


def exact(value):
    return value if isinstance(value, Estimate) else Estimate(float(value), float(value), float(value))


def broken_down(step, ranks=None, straggler=None, **ms):
    """``ms`` are the parts of the shown rank, and ``ranks`` those of all ranks if there are others."""
    parts = {part: exact(ms.get(part, 0)) for part in PARTS}
    ranks = [{part: each.get(part, 0) for part in PARTS} for each in ranks or [{k: e.value for k, e in parts.items()}]]
    return Breakdown(0, exact(step), parts, ranks, straggler, ONE_SYNC)


def with_link(alpha_ns, beta_ns_per_byte):
    return gradcast.load_profile("resnet50").replace(world_size=4, link=link_of(alpha_ns, beta_ns_per_byte))


def situation(profile, step_ms=None, *, setup=SETUP, hosts=ONE_EACH, **more):
    """A training whose steps take exactly what ``play`` predicts for DDP on this profile, if nothing is said."""
    step_ms = step_ms or ddp_baseline.plan(profile, SETUP.caps_bytes).predicted_ns / MS
    found = broken_down(step_ms, forward=profile.forward_ns / MS, backward=profile.backward_ns / MS)
    return Situation(found, setup, profile, hosts, **more)


def by_key(known):
    return {action.key: action for action in actions.actions(known)}


def of_parts(step, ranks=None, **ms):
    """The actions that need no profile."""
    return by_key(Situation(broken_down(step, ranks, **ms), SETUP, None, ONE_EACH))


# --- Actions ---


def test_the_gain_of_overlap_mode_is_that_of_play():
    profile = with_link(500e3, 2.0)
    found = situation(profile)
    overlap = by_key(found)["overlap"]
    plan = gradcast.make_plan(profile, profile.link)
    assert overlap.predicted_ms == pytest.approx(plan.predicted_ns / MS)
    assert overlap.speedup == pytest.approx(found.step_ms / overlap.predicted_ms)
    assert overlap.low == overlap.high == overlap.speedup, "no spread, no range"
    assert actions.floor_ms(found) == pytest.approx(plan.bound_ns / MS)
    # What is measured above the prediction stays when something is changed.
    longer = by_key(situation(profile, found.step_ms + 30))["overlap"]
    assert longer.predicted_ms == pytest.approx(overlap.predicted_ms + 30)
    assert longer.speedup < overlap.speedup


def test_a_range_comes_from_the_spread_of_the_network():
    overlap = by_key(situation(with_link(500e3, 1.0), spread=(0.8, 1.3)))["overlap"]
    assert overlap.low <= overlap.speedup <= overlap.high
    assert overlap.low < overlap.high


def test_actions_come_in_the_order_of_their_gain():
    parts = {"forward": 30, "backward": 70, "launch": 20, "update": 10, "data_storage": 50, "data_cpu": 10}
    found = of_parts(200, waiting=8, network=2, **parts)
    # Two batches: one that sends nothing but still waits for the slower rank, 188, and one as now.
    expected = {"loader": 140, "launch": 180, "straggler": 192, "accumulate": (188 + 200) / 2, "balance": 200}
    assert list(found) == list(expected)
    assert {key: each.predicted_ms for key, each in found.items()} == pytest.approx(expected)
    assert found["loader"].speedup == pytest.approx(200 / 140)


def test_a_loader_gains_what_the_slowest_rank_gains():
    own, other = {"forward": 30, "backward": 60, "data_cpu": 50}, {"forward": 30, "backward": 160}
    loader = of_parts(200, [own, other], waiting=50, **own)["loader"]
    assert loader.speedup == 1.0, "the other rank computes as long as this one loads"
    own = {"forward": 30, "backward": 60}
    loader = of_parts(200, [own, own | {"data_storage": 100}], waiting=100, **own)["loader"]
    assert loader.speedup == pytest.approx(2.0), "this rank waits for the other one's loader"


def test_balanced_shares_take_equally_long_on_all_ranks():
    fast, slow = {"forward": 30, "backward": 70, "update": 10}, {"forward": 60, "backward": 140, "update": 10}
    balance = of_parts(215, [fast, fast, fast, slow], waiting=100, **fast)["balance"]
    # Of 4 shares a fast rank takes 8/7 and the slow one 4/7: 114 ms each in place of 200.
    assert balance.predicted_ms == pytest.approx(215 - (200 - 800 / 7))
    assert "BalancedBatchSampler" in balance.how
    equal = of_parts(120, [fast, fast], waiting=0, **fast)["balance"]
    assert equal.speedup == 1.0


def test_a_range_of_a_part_is_that_of_its_gain():
    straggler = of_parts(200, forward=100, waiting=Estimate(50.0, 30.0, 60.0))["straggler"]
    assert (straggler.low, straggler.high) == (pytest.approx(200 / 170), pytest.approx(200 / 140))


def test_without_numbers_to_cast_there_is_no_wire_format_and_without_streams_no_connections():
    slow = with_link(500e3, 6.0)
    found = by_key(situation(slow, setup=dataclasses.replace(SETUP, is_fp32=False)))
    assert not {"wire", "connections"} & found.keys()
    found = by_key(situation(slow, streams_gain=2.0))
    assert found["wire"].speedup > found["overlap"].speedup
    assert found["connections"].speedup > 1.2
    # More than DDP has operations under way do not help.
    assert by_key(situation(slow, streams_gain=3.9))["connections"] == found["connections"]


def test_a_wire_format_is_offered_only_where_it_saves_bytes():
    """On 2 hosts of 2 ranks, DDP's ring sends 1.5 times the gradients, 16 bits in sums of hosts half of them."""
    slow = with_link(500e3, 6.0)
    some = by_key(situation(slow, hosts=Hosts.even(2, 2)))["wire"]
    cheaper = gradcast.make_plan(slow, slow.link.scaled(1, 1 / 3), mode="overlap")
    assert some.predicted_ms == pytest.approx(cheaper.predicted_ns / MS)
    assert "wire" not in by_key(situation(slow, hosts=Hosts((0, 0, 0, 0, 1, 1, 1, 2))))


def test_powersgd_is_predicted_where_shapes_are_known():
    slow = with_link(500e3, 6.0)
    assert "powersgd" not in by_key(situation(slow))
    # All of it as matrices of 1,000 columns, so that nearly nothing travels.
    shapes = {tensor.name: [-(-tensor.bytes // 4000), 1000] for tensor in slow.tensors}
    found = by_key(situation(powersgd.with_shapes(slow, shapes)))["powersgd"]
    sent = 16 * sum(rows + columns for rows, columns in shapes.values() if 8 * (rows + columns) < rows * columns)
    assert found.predicted_ms == pytest.approx((slow.forward_ns + slow.backward_ns + 1.5e6 + 6 * sent) / MS, rel=0.02)
    assert "changes the numbers" in found.title


def test_local_steps_are_listed_where_fewer_bits_are_not_enough():
    assert "local" not in by_key(situation(with_link(500e3, 6.0)))
    slow = with_link(500e3, 60.0)
    found = by_key(situation(slow))["local"]
    assert "changes the algorithm" in found.title
    assert "arXiv 2311.08105" in found.title
    every = local_rounds.suggested_every(slow, slow.link)
    assert f"LocalSteps({every})" in found.how
    assert found.predicted_ms == pytest.approx((slow.forward_ns + slow.backward_ns) / MS, rel=0.3)
    assert found.speedup > 3 * by_key(situation(slow))["wire"].speedup


def test_where_the_loop_uses_all_gradients_nothing_is_promised_of_travelling_under_forward():
    profile = with_link(500e3, 8.0)  # traffic takes longer than compute, also with half of the bytes
    usual = situation(profile)
    used = dataclasses.replace(usual, setup=dataclasses.replace(SETUP, gradients_used=True))
    before, after = by_key(usual), by_key(used)
    assert before.keys() - after.keys() == {"overlap"}
    assert after["hook"] == before["hook"]
    half = profile.link.scaled(1, 0.5)
    assert after["wire"].predicted_ms == pytest.approx(gradcast.make_plan(profile, half, mode="hook").predicted_ns / MS)
    assert after["wire"].predicted_ms > before["wire"].predicted_ms
    assert after["wire"].how == 'gradcast.attach(model, options=gradcast.Options(wire="bf16"))'
    assert actions.floor_ms(used) > actions.floor_ms(usual)
    assert actions.overlap_left_out(usual) is None
    assert "between backward and step()" in actions.overlap_left_out(used)


def test_lines_that_would_wait_early_have_their_predicted_cost():
    """The worst first: what reads all parameters lets nothing overlap with forward."""
    profile = with_link(500e3, 8.0)
    names = [tensor.name for tensor in profile.tensors]
    use = {"where": "train.py:83", "what": "reads parameters after step()", "advice": "pass it on"}
    uses = [
        use | {"where": f"train.py:{line}", "parameters": read} for line, read in ((90, names[:1]), (91, names[-1:]))
    ]
    setup = dataclasses.replace(SETUP, early_uses=[*uses, use | {"parameters": names}])
    first, last, second = actions.early_waits(situation(profile, setup=setup))
    assert [each["where"] for each in (first, last, second)] == ["train.py:83", "train.py:91", "train.py:90"]
    assert first["ms"] > last["ms"] > 0, "its gradient is ready first, so it arrives before the others"
    assert second["ms"] == pytest.approx(0, abs=1), "forward reads it first anyway"
    plans = [gradcast.make_plan(profile, profile.link, mode=mode) for mode in ("hook", "overlap")]
    assert first["ms"] == pytest.approx((plans[0].predicted_ns - plans[1].predicted_ns) / MS, rel=0.05)
    sentences = runs.early_wait_sentences({"early_waits": [first, second], "step": {"ms": 100.0}})
    cost = f"which costs overlap mode {first['ms']:.0f} ms per step"
    assert sentences == [f"train.py:83 reads parameters after step(), {cost}: pass it on."]
    untried = dataclasses.replace(situation(profile, setup=setup), profile=None)
    assert [each["ms"] for each in actions.early_waits(untried)] == [None, None, None]


def test_no_step_is_predicted_to_be_shorter_than_its_passes():
    """The network was far slower during the trial than in the measured steps."""
    profile = with_link(500e3, 20.0)
    passes_ms = (profile.forward_ns + profile.backward_ns) / MS
    fast = situation(profile, 1.5 * passes_ms)
    assert fast.step_ms < situation(profile).step_ms / 2
    for action in actions.actions(fast):
        assert action.predicted_ms >= passes_ms
        assert action.high <= 1.5 + 1e-9, action.key
    assert actions.floor_ms(fast) >= passes_ms
    # A step with an interval wider than itself, and an action that would remove more time than there is.
    found = of_parts(Estimate(100.0, 90.0, 400.0), forward=10, backward=30, waiting=Estimate(70.0, 0.0, 500.0))
    assert [found[key].high for key in ("accumulate", "straggler")] == pytest.approx([100 / 40] * 2)
    assert (found["straggler"].predicted_ms, found["straggler"].speedup) == (40, pytest.approx(100 / 40))
    # Passes too short to be measured, in steps of launching.
    unseen = of_parts(2.0, launch=2)
    assert unseen["launch"].speedup == 1.0


def test_a_step_that_only_computes_is_hopeless_and_says_so():
    found = situation(with_link(1e3, 1e-4))
    listed = [action for action in actions.actions(found) if action.key != "accumulate"]
    assert actions.hopeless(found, listed).startswith("None of these actions will help, because 100% of the step")
    assert actions.hopeless(found, actions.actions(situation(with_link(500e3, 2.0)))) is None


# --- The verdict ---


@pytest.mark.parametrize(
    ("ms", "more", "kind", "words"),
    [
        ({"forward": 60, "backward": 138, "network": 2}, {}, "compute-bound", "99% of the step's 200 ms"),
        ({"forward": 60, "loop": 100}, {}, "compute-bound", "the loop's own work (the loss, logging"),
        ({"forward": 100, "launch": 60}, {}, "compute-bound", "launch overhead (Python and the framework) another 30%"),
        ({"forward": 60, "launch": 100}, {}, "compute-bound", "takes 50% of the step's 200 ms, compute 30%"),
        # Errors of measurement are no stalls.
        ({"forward": 230, "waiting": -10, "rest": -20}, {}, "compute-bound", "Compute is the limit"),
        ({"forward": 100, "network": 100}, {"latency_share": 0.1}, "bandwidth-bound", "between nodes."),
        ({"forward": 100, "interconnect": 100}, {}, "bandwidth-bound", "between the devices of a node"),
        ({"forward": 100, "network": 100}, {"latency_share": 0.8}, "latency-bound", "80% of communication time"),
        ({"forward": 120, "data_storage": 50, "network": 30}, {}, "data-bound", "reading it from storage"),
        ({"forward": 120, "data_cpu": 50, "network": 30}, {}, "data-bound", "preparing it on the CPU"),
        (
            {"forward": 120, "waiting": 50, "network": 30, "straggler": Straggler(3, "backward", "layer3.0", 50.0)},
            {},
            "straggler",
            "waiting for rank 3, which takes longer in backward, most of it in layer3.0",
        ),
        ({"forward": 120, "waiting": 50}, {}, "straggler", "25% of the step, 50 ms, is waiting for a slower rank."),
        (
            {"forward": 100, "network": 100},
            {"mistake": Mistake("", "this", 30.0, "")},
            "misconfigured",
            "this: 30 of 200 ms",
        ),
        (
            {"forward": 100, "network": 100},
            {"mistake": Mistake("", "this", 3.0, "")},
            "bandwidth-bound",
            "100 of 200 ms, is exposed communication between nodes.",
        ),
    ],
)
def test_the_verdict_names_what_costs_most(ms, more, kind, words):
    found, sentence = bottleneck(broken_down(200, **ms), **more)
    assert found == kind
    assert words in sentence


# --- Timelines ---


def trace(rank, shift_ms):
    def ns(ms):
        return round((ms + shift_ms) * MS)

    return RankTrace(
        rank=rank,
        steps=[Step(5, ns(0), ns(100)), Step(6, ns(100), ns(200)), Step(7, ns(200), ns(300))],
        spans=[Span("backward", ns(100), ns(160)), Span("wait", ns(160), ns(170)), Span("forward", ns(165), ns(200))],
        blocks=[
            BlockSpan(step, block, block, ns(at + 20), ns(at + 30 + 20 * block), ns(at + 60 + 20 * block))
            for step, at in ((5, 0), (6, 100))
            for block in range(2)
        ],
        table=[{"block": block, "bytes": 1_000_000, "tensors": [f"t{block}", "last"]} for block in range(2)],
    )


def test_one_step_is_shown_on_every_rank_from_its_first_start():
    shown = timelines.measured([trace(0, 5.0), trace(1, 7.0)])
    assert [each["rank"] for each in shown] == [0, 1]
    assert shown[0]["spans"][0] == {"kind": "backward", "start_ms": 0.0, "end_ms": 60.0}
    assert shown[1]["spans"][0]["start_ms"] == 2.0
    assert shown[1]["blocks"][1] == {
        "block": 1, "bytes": 1_000_000, "ready_ms": 22.0, "launch_ms": 52.0, "finish_ms": 82.0, "first": "t1",
        "last": "last",
    }  # fmt: skip


def test_a_step_that_one_rank_does_not_know_is_not_shown():
    short = trace(1, 0.0)
    short.blocks[:] = [block for block in short.blocks if block.step == 5]
    shown = timelines.measured([trace(0, 0.0), short])
    assert shown[0]["blocks"][0]["launch_ms"] == 30.0, "step 5, from its own start"
    assert timelines.measured([]) == []


def test_bandwidth_is_of_the_time_in_which_anything_travels():
    # Two blocks of 1 MB in flight for 30 ms each, 10 of them together.
    rows = timelines.bandwidth(trace(0, 0.0))
    assert [row["step"] for row in rows] == [5, 6]
    assert rows[0]["gbit_per_s"] == pytest.approx(8 * 2e6 / 50e6)
    assert rows[1]["at_ms"] == 100.0


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_the_predicted_step_is_that_of_play(mode):
    profile = with_link(500e3, 2.0)
    plan = gradcast.make_plan(profile, profile.link, mode=mode)
    shown = timelines.predicted(profile, plan)
    spans = shown["spans"]
    assert spans[0] == {"kind": "backward", "start_ms": 0.0, "end_ms": pytest.approx(profile.backward_ns / MS)}
    assert spans[-1]["end_ms"] == pytest.approx(plan.predicted_ns / MS, abs=1e-3)
    for one, other in itertools.pairwise(spans):
        assert other["start_ms"] == pytest.approx(one["end_ms"], abs=2e-3), "no gap, no overlap"
    waited = sum(span["end_ms"] - span["start_ms"] for span in spans if span["kind"] == "wait")
    assert waited == pytest.approx(plan.predicted_ns / MS - (profile.backward_ns + profile.forward_ns) / MS, abs=0.1)
    assert [block["bytes"] for block in shown["blocks"]] == [block.size_bytes for block in plan.blocks]
