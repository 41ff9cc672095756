"""The merged trace of all ranks: structure, size, and compatibility with other tools."""

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

import gradcast
from diagnosis import doctor_runs
from gradcast import _core
from gradcast.diagnosis.trace import files as trace_files
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.diagnosis.trace.merged import BlockSpan, RankTrace, Span, Step
from gradcast.errors import Error

MS = 1_000_000


# --- The merged trace ---


@pytest.fixture(scope="module")
def ranks():
    return doctor_runs.rank_traces(world_size=4, step_count=10)


@pytest.fixture(scope="module")
def merged(ranks):
    return merged_trace.merge(ranks)


def recorded(rank=0, *, spans=(), blocks=(), tensors=("x", "x"), steps=()):
    """A rank whose blocks have 4 and 40 bytes; times of spans, blocks and steps are in ms."""

    def ns(*times):
        return [round(each * MS) for each in times]

    table = [{"block": i, "bytes": 4 * 10**i, "tensors": [name], "reason": ""} for i, name in enumerate(tensors)]
    return RankTrace(
        rank,
        steps=[Step(number, *ns(*ends)) for number, ends in enumerate(steps)],
        spans=[Span(kind, *ns(*ends)) for kind, *ends in spans],
        blocks=[BlockSpan(step, block, block, *ns(*times)) for step, block, *times in blocks],
        table=table,
    )


def spans_of(merged, **fields):
    events = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    return [event for event in events if all(event[key] == value for key, value in fields.items())]


def test_ranks_lie_on_one_clock(ranks, merged):
    """The four clocks are seven seconds apart each; the steps began within a fraction of a millisecond."""
    assert ranks[3].steps[0].start_ns - ranks[0].steps[0].start_ns > 20 * 10**9
    first = [spans_of(merged, pid=rank, name="ProfilerStep#0")[0]["ts"] for rank in range(4)]
    assert max(first) - min(first) < 300
    assert min(event["ts"] for event in merged["traceEvents"] if "ts" in event) >= 0


def test_events_of_a_lane_nest(merged):
    lanes = defaultdict(list)
    for event in spans_of(merged):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) >= 4 * 3
    for lane in lanes.values():
        for (start, end), (other_start, other_end) in itertools.combinations(
            sorted(lane, key=lambda e: (e[0], -e[1])), 2
        ):
            assert other_start >= end or other_end <= end, (start, end, other_start, other_end)


def test_every_step_and_block_is_there_once(ranks, merged):
    blocks = Counter((event["pid"], event["name"]) for event in spans_of(merged, cat="block"))
    assert len(blocks) == 4 * len(ranks[0].table)
    assert set(blocks.values()) == {10}
    steps = Counter(event["name"] for event in spans_of(merged, cat="step"))
    assert steps == {f"ProfilerStep#{number}": 4 for number in range(10)}


def test_names_of_tensors_stand_there_once_beside_the_table(ranks, merged):
    assert merged["gradcast"]["blocks"] == ranks[0].table
    name = ranks[0].table[1]["tensors"][0]
    shared = sum(line["tensors"].count(name) for line in ranks[0].table)
    assert json.dumps(merged).count(f'"{name}"') == 2 * shared


def test_ranks_that_number_their_tables_differently_agree():
    one, two = recorded(tensors=("a", "b")), recorded(1, tensors=("a", "b"), blocks=[(0, 1, 0, 0, 1)])
    two.table.reverse()
    merged = merged_trace.merge([one, two])
    assert [line["bytes"] for line in merged["gradcast"]["blocks"]] == [4, 40]
    assert spans_of(merged, cat="block")[0]["args"]["bytes"] == 4


def test_blocks_in_flight_together_get_lanes_of_their_own():
    merged = merged_trace.merge([recorded(blocks=[(0, 0, 0, 0, 5), (0, 1, 0, 2, 6)])])
    assert {event["tid"] for event in spans_of(merged, cat="block")} == {2, 3}
    assert {"link", "link 2"} <= {event["args"]["name"] for event in merged["traceEvents"] if event["ph"] == "M"}
    counters = [(event["ts"], event["args"]["bytes"]) for event in merged["traceEvents"] if event["ph"] == "C"]
    assert counters == [(0, 4), (2000, 44), (5000, 40), (6000, 0)]


def test_an_arrow_leads_from_ready_over_the_block_to_the_wait_that_it_ended():
    spans = [("backward", 0, 10), ("forward", 10, 30), ("wait", 12, 20)]
    trace = recorded(spans=spans, blocks=[(0, 0, 4, 5, 11), (0, 1, 10, 11, 19.991)], steps=[(0, 30)])
    arrows = [event for event in merged_trace.merge([trace])["traceEvents"] if event["ph"] in "stf"]
    # Block 0 was there before anyone asked: nothing waited for it.
    places = [(event["ph"], event["tid"], event["ts"]) for event in arrows]
    assert places == [("s", 1, 9999), ("t", 2, 11_000), ("f", 1, 19_999)]
    assert len({event["id"] for event in arrows}) == 1


def test_arrows_begin_and_end_inside_of_events(merged):
    arrows = [event for event in merged["traceEvents"] if event["ph"] in "stf"]
    assert arrows
    assert set(Counter(event["id"] for event in arrows).values()) <= {2, 3}
    inside = {lane: spans_of(merged, pid=lane[0], tid=lane[1]) for lane in {(e["pid"], e["tid"]) for e in arrows}}
    for arrow in arrows:
        events = inside[arrow["pid"], arrow["tid"]]
        assert any(event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"] for event in events), arrow


def test_looks_that_found_everything_there_are_left_out():
    trace = recorded(spans=[("wait", 0, 0.005), ("wait", 1, 2)])
    assert len(spans_of(merged_trace.merge([trace]), name="wait")) == 1


def test_a_hundred_steps_of_eight_ranks_are_less_than_a_megabyte(tmp_path):
    """Each step has thirty blocks and overlap mode's many small spans: a wait and an update of every block's
    parameters.
    """
    ranks = doctor_runs.rank_traces(world_size=8, step_count=100, profile="resnet152", cap_bytes=6.4e6)
    assert 30 <= len(ranks[0].table) <= 33
    dice = random.Random(5)
    for rank in ranks:
        for block in rank.blocks:
            ends = sorted(block.finish_ns + dice.randrange(300_000) for _ in range(3))
            rank.spans += [Span("wait", *ends[:2]), Span("update", *ends[1:])]
    trace_files.save(merged_trace.merge(ranks), tmp_path / "trace.json.gz")
    assert 200_000 < (tmp_path / "trace.json.gz").stat().st_size < 1_000_000


def test_a_wait_that_seems_to_outlast_forward_is_cut():
    spans = [Span("forward", 0, 10 * MS), Span("wait", 8 * MS, 10 * MS + 7000), Span("backward", 11 * MS, 12 * MS)]
    assert merged_trace.nested(spans) == [spans[0], Span("wait", 8 * MS, 10 * MS), spans[2]]


def test_a_handle_without_a_plan_has_an_empty_trace():
    empty = merged_trace.compact({"traceEvents": [], "distributedInfo": {"rank": 1, "world_size": 2}})
    assert empty == RankTrace(1)
    assert merged_trace.merge([empty])["traceEvents"]


def test_a_handles_timeline_becomes_compact():
    """Uses the class that records steps in training, whose output the merged trace is made of."""
    pytest.importorskip("torch", reason="this needs torch, which is not installed: pip install torch")
    from gradcast.training.measure.step_trace import StepRecord, StepTrace

    model, now = gradcast.load_profile("vgg16"), 5_000_000_000
    link = _core.ring_link(_core.Hop(**doctor_runs.HOP), 4)
    plan = gradcast.make_plan(model, link)
    trace, iterations = StepTrace(8), []
    for step in range(3):
        start = now + step * 100 * MS
        trace.begin(StepRecord(step, step, plan, model, start))
        trace.span("backward", start, start + 40 * MS)
        trace.span("wait", start + 40 * MS, start + 50 * MS)
        launches = [start + index * MS for index in range(len(plan.blocks))]
        times = [SimpleNamespace(ready_ns=start, launch_ns=launch, finish_ns=launch + MS) for launch in launches]
        iterations.append(SimpleNamespace(iteration=step, blocks=times))
    timeline = {"traceEvents": trace.events(1, iterations), "distributedInfo": {"rank": 1, "world_size": 2}}
    found = merged_trace.compact(timeline)
    assert found.rank == 1
    ends = [now + 100 * MS, now + 200 * MS, max(found.blocks[-1].finish_ns, now + 250 * MS)]
    assert found.steps == [Step(number, now + number * 100 * MS, end) for number, end in enumerate(ends)]
    assert [line["bytes"] for line in found.table] == [block.size_bytes for block in plan.blocks]
    assert len(found.blocks) == 3 * len(plan.blocks)
    assert found.blocks[1][3:] == (now, now + MS, now + 2 * MS)


# --- Files ---


def test_files_come_back_as_they_were(tmp_path, merged):
    path = tmp_path / "trace.json.gz"
    trace_files.save(merged, path)
    assert trace_files.load(path) == merged
    first = path.read_bytes()
    trace_files.save(merged, path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "trace.json"
    plain.write_text(json.dumps(merged))
    assert trace_files.load(plain) == merged


@pytest.mark.parametrize(
    ("content", "words"), [("{", "ends too early"), ("[]", "no list"), (b"\x1f\x8b\x08", "is not a trace")]
)
def test_what_is_no_trace_is_said(tmp_path, content, words):
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Error, match=words):
        trace_files.load(path)
    with pytest.raises(Error, match="does not exist"):
        trace_files.load(tmp_path / "none.json")


# --- For Holistic Trace Analysis ---


def kernels_of(trace):
    """Returns (name, start, end) in us of the events that HTA counts: those on a stream."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "kernel"]
    return sorted((event["name"], event["ts"], event["ts"] + event["dur"]) for event in events)


def test_what_forward_waits_is_no_kernel():
    spans = [("backward", 0, 10), ("forward", 10, 30), ("wait", 12, 20), ("update", 20, 22), ("wait", 25, 30)]
    trace = recorded(spans=spans, blocks=[(0, 0, 4, 5, 20)], steps=[(0, 30)])
    merged = merged_trace.merge([trace])
    rank = trace_files.of_rank(merged, 0, merged["traceEvents"])
    assert kernels_of(rank) == [
        ("backward", 0, 10_000), ("forward", 10_000, 12_000), ("forward", 22_000, 25_000),
        ("ncclKernel block 0", 5_000, 20_000), ("update", 20_000, 22_000),
    ]  # fmt: skip
    waits = [event for event in rank["traceEvents"] if event["ph"] == "X" and event["name"] == "wait"]
    assert [(event["cat"], event["ts"], event["dur"]) for event in waits] == [
        ("user_annotation", 12_000, 8_000), ("user_annotation", 25_000, 5_000),
    ]  # fmt: skip


# --- The real package ---

ASK_HTA = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
overlap = analysis.get_comm_comp_overlap(visualize=False)
times = analysis.get_temporal_breakdown(visualize=False)
print(json.dumps({"ranks": sorted(analysis.t.traces), "steps": [int(step) for step in analysis.get_profiler_steps()],
  "overlap": overlap["comp_comm_overlap_pctg"].tolist(), "compute_us": times["compute_time(us)"].tolist()}))
"""


def python_with_hta():
    """This Python, or the one that GRADCAST_HTA_PYTHON names, as `make test-all` does: HTA has its own environment
    there, see tools/hta.txt.
    """
    named = os.environ.get("GRADCAST_HTA_PYTHON")
    if named is None and importlib.util.find_spec("hta") is None:
        pytest.skip("Holistic Trace Analysis is not installed; `make test-all` does that, see tools/hta.txt")
    return named or sys.executable


def work_of(rank):
    """Returns the times in which compute worked: inside a span, and not in a wait."""
    ends = sorted({time_ns for span in rank.spans for time_ns in span[1:]})

    def covers(start, end, waits):
        return any(
            span.start_ns <= start and end <= span.end_ns for span in rank.spans if (span.kind == "wait") == waits
        )

    return [pair for pair in itertools.pairwise(ends) if covers(*pair, False) and not covers(*pair, True)]


def overlap_of(rank):
    """Returns the percentage of the time with a block in flight in which compute worked."""
    busy = work_of(rank)
    sent = [(block.launch_ns, block.finish_ns) for block in rank.blocks]
    both = sum(max(0, min(end, stop) - max(start, go)) for start, end in busy for go, stop in sent)
    return 100 * both / sum(stop - go for go, stop in sent)


@pytest.mark.slow
def test_hta_loads_the_files_of_the_ranks(tmp_path, ranks, merged):
    python = python_with_hta()
    paths = trace_files.save_per_rank(merged, tmp_path / "hta")
    assert [path.name for path in paths] == [f"rank{rank}.json.gz" for rank in range(4)]
    asked = subprocess.run([python, "-c", ASK_HTA, tmp_path / "hta"], capture_output=True, text=True, timeout=200)
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert told["ranks"] == [0, 1, 2, 3]
    assert told["steps"] == list(range(10))
    for rank, overlap, compute_us in zip(ranks, told["overlap"], told["compute_us"], strict=True):
        assert overlap == pytest.approx(overlap_of(rank), abs=0.5)
        work_ns = sum(end - start for start, end in work_of(rank))
        assert compute_us == pytest.approx(work_ns / 1e3, rel=1e-3)
