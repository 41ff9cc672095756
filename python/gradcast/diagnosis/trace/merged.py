"""Merges the traces of all ranks into one on rank 0's clock. Pure: events in, Chrome's JSON as a dict out
(docs/guide/report.md).

Each rank hands over its events as a ``RankTrace``: numbers only, with the description of each block once in a table. So
a step of 30 blocks is a few kB on its way to rank 0, and tensor names stand in the merged trace once, not with every
block of every step. Each rank becomes a process with the lanes "steps", "compute" and "link". Blocks that are in flight
together get lanes of their own ("link 2"), because events of one lane must nest.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gradcast.diagnosis.trace.clocks import Clock
from gradcast.diagnosis.trace.lanes import in_lanes, nested
from gradcast.errors import Error

SCHEMA_VERSION = 1
# Shorter spans are left out. Checking whether something has arrived takes some microseconds at every parameter that is
# read; these checks cannot be seen beside steps of milliseconds, and would be most of the events.
_SHORTEST_NS = 20_000
_STEPS, _COMPUTE, _LINK = 0, 1, 2

_Event = dict[str, Any]


class Step(NamedTuple):
    number: int
    start_ns: int
    end_ns: int


class Span(NamedTuple):
    """``kind`` is "forward", "backward", "update" or "wait"."""

    kind: str
    start_ns: int
    end_ns: int


class BlockSpan(NamedTuple):
    """``entry`` is the index of the block's description in the table."""

    step: int
    block: int
    entry: int
    ready_ns: int
    launch_ns: int
    finish_ns: int


_SAME = Clock()


@dataclasses.dataclass
class RankTrace:
    """What one rank recorded, on its own clock. ``table`` has the bytes, tensors and reason of each kind of block."""

    rank: int
    host: str = ""
    clock: Clock = _SAME
    steps: list[Step] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    blocks: list[BlockSpan] = dataclasses.field(default_factory=list)
    table: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def aligned(self) -> "RankTrace":
        """Returns the trace on rank 0's clock."""
        to = self.clock.aligned
        return dataclasses.replace(
            self,
            clock=_SAME,
            steps=[Step(number, to(start), to(end)) for number, start, end in self.steps],
            spans=[Span(kind, to(start), to(end)) for kind, start, end in self.spans],
            blocks=[BlockSpan(*block[:3], *(to(time_ns) for time_ns in block[3:])) for block in self.blocks],
        )


def compact(timeline: dict[str, Any], *, clock: Clock | None = None, host: str = "") -> RankTrace:
    """Makes a RankTrace from ``handle.timeline()`` of a rank. ``clock`` maps this rank's clock to rank 0's."""
    trace = RankTrace(timeline["distributedInfo"]["rank"], host, clock or Clock())
    starts: dict[int, int] = {}
    last_ns = 0
    entries: dict[tuple, int] = {}
    for event in timeline["traceEvents"]:
        if event["ph"] != "X":
            continue
        start_ns, end_ns = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
        last_ns = max(last_ns, end_ns)
        arguments = event["args"]
        if event["cat"] != "block":
            # A record begins with backward, and so does a step here.
            if event["cat"] == "backward":
                starts.setdefault(arguments["step"], start_ns)
            trace.spans.append(Span(event["cat"], start_ns, end_ns))
            continue
        entry = _entry(trace.table, entries, arguments)
        ready_ns = round(arguments["ready_us"] * 1e3)
        trace.blocks.append(BlockSpan(arguments["step"], arguments["block"], entry, ready_ns, start_ns, end_ns))
    ordered = [*sorted(starts.items(), key=lambda item: item[1]), (None, last_ns)]
    trace.steps = [Step(*start, end_ns) for start, (_, end_ns) in itertools.pairwise(ordered)]
    return trace


def _entry(table: list[dict[str, Any]], known: dict[tuple, int], fields: dict[str, Any]) -> int:
    """Returns the index of the block's description in the table, and adds it if it is new."""
    key = (fields["block"], fields["bytes"], tuple(fields["tensors"]), fields.get("reason", ""))
    if key not in known:
        known[key] = len(table)
        block, size, tensors, reason = key
        table.append({"block": block, "bytes": size, "tensors": list(tensors), "reason": reason})
    return known[key]


def merge(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Returns Chrome's JSON as a dict; ``gradcast.diagnosis.trace.files.save`` writes it."""
    if not ranks:
        raise Error("no traces to merge; give at least one rank's", "invalid_use")
    ordered = [rank.aligned() for rank in sorted(ranks, key=lambda each: each.rank)]
    table, entries = _common_table(ordered)
    zero_ns = _first_ns(ordered)
    numbers = itertools.count(1)
    described: set[int] = set()
    events: list[_Event] = []
    for rank, own_entries in zip(ordered, entries, strict=True):
        events += _rank_events(rank, own_entries, table, zero_ns, numbers, described)
    # Of one rank only: the same blocks are in flight on all of them, as far as the lanes show, and counters of all
    # ranks would be half of the file.
    sizes = [table[line]["bytes"] for line in entries[0]]
    events += _in_flight(_EventMaker(ordered[0].rank, zero_ns), ordered[0].blocks, sizes)
    return {
        "schemaVersion": SCHEMA_VERSION,
        "distributedInfo": {"rank": ordered[0].rank, "world_size": len(ordered)},
        "displayTimeUnit": "ms",
        "gradcast": {"start_ns": zero_ns, "hosts": [rank.host for rank in ordered], "blocks": table},
        "traceEvents": events,
    }


def _first_ns(ranks: Sequence[RankTrace]) -> int:
    """Returns the start of the trace. Times relative to it have few digits."""
    starts = [step.start_ns for rank in ranks for step in rank.steps]
    starts += [span.start_ns for rank in ranks for span in rank.spans]
    starts += [min(block.ready_ns, block.launch_ns) for rank in ranks for block in rank.blocks]
    return min(starts, default=0)


def _common_table(ranks: Sequence[RankTrace]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Merges the ranks' tables, since ranks follow the same plans. Also returns where each rank's lines went."""
    table: list[dict[str, Any]] = []
    known: dict[tuple, int] = {}
    return table, [[_entry(table, known, line) for line in rank.table] for rank in ranks]


def _rank_events(
    rank: RankTrace,
    entries: Sequence[int],
    table: list[dict[str, Any]],
    zero_ns: int,
    numbers: Iterable[int],
    described: set[int],
) -> list[_Event]:
    lanes = in_lanes(rank.blocks, lambda block: (block.launch_ns, block.finish_ns))
    events = _names(rank, len(lanes))
    make = _EventMaker(rank.rank, zero_ns)
    events += [make.span(_STEPS, f"ProfilerStep#{step.number}", "step", *step[1:]) for step in rank.steps]
    spans = nested([span for span in rank.spans if span.end_ns - span.start_ns >= _SHORTEST_NS])
    events += [make.span(_COMPUTE, span.kind, "compute", span.start_ns, span.end_ns) for span in spans]
    for lane, blocks in enumerate(lanes):
        for block in blocks:
            line = entries[block.entry]
            arguments = {"bytes": table[line]["bytes"]}
            if line not in described:  # names only with the first of these blocks
                arguments |= {"tensors": table[line]["tensors"], "reason": table[line]["reason"]}
                described.add(line)
            name = f"block {block.block}"
            events.append(
                make.span(_LINK + lane, name, "block", block.launch_ns, block.finish_ns) | {"args": arguments}
            )
    lane_of = {block: lane for lane, blocks in enumerate(lanes) for block in blocks}
    backward = [span for span in spans if span.kind == "backward"]
    for span, block in _waited_for(spans, rank.blocks):
        events += make.arrows(next(iter(numbers)), backward, block, _LINK + lane_of[block], span)
    return events


def _waited_for(spans: Sequence[Span], blocks: Sequence[BlockSpan]) -> list[tuple[Span, BlockSpan]]:
    """Pairs each wait with the block that ended it: the last one that finished during the wait."""
    finished = sorted(blocks, key=lambda block: block.finish_ns)
    ends_ns = [block.finish_ns for block in finished]
    found = []
    for span in spans:
        last = bisect.bisect_right(ends_ns, span.end_ns) - 1
        if span.kind == "wait" and last >= 0 and ends_ns[last] > span.start_ns:
            found.append((span, finished[last]))
    return found


def _in_flight(make: "_EventMaker", blocks: Sequence[BlockSpan], sizes: Sequence[int]) -> list[_Event]:
    """A counter of bytes in flight, with one value per change. Launches at the instant of a finish are the same
    change.
    """
    changes: dict[int, int] = {}
    for block in blocks:
        for time_ns, change in ((block.launch_ns, sizes[block.entry]), (block.finish_ns, -sizes[block.entry])):
            changes[make.us(time_ns)] = changes.get(make.us(time_ns), 0) + change
    times = sorted(changes)
    values = itertools.accumulate(changes[time_us] for time_us in times)
    return [make.counter(time_us, value) for time_us, value in zip(times, values, strict=True)]


def _names(rank: RankTrace, link_lanes: int) -> list[_Event]:
    at = f" on {rank.host}" if rank.host else ""
    links = [f"link {lane + 1}" if lane else "link" for lane in range(link_lanes)]
    events = [_name(rank.rank, 0, "process_name", f"rank {rank.rank}{at}")]
    return events + [
        _name(rank.rank, lane, "thread_name", name) for lane, name in enumerate(["steps", "compute", *links])
    ]


def _name(rank: int, lane: int, kind: str, name: str) -> _Event:
    return {"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": {"name": name}}


class _EventMaker:
    """Makes events of one rank. Times are whole microseconds, which keeps the order and so the nesting."""

    def __init__(self, rank: int, zero_ns: int) -> None:
        self._rank = rank
        self._zero_ns = zero_ns

    def us(self, time_ns: int) -> int:
        return (time_ns - self._zero_ns) // 1000

    def span(self, lane: int, name: str, category: str, start_ns: int, end_ns: int) -> _Event:
        start = self.us(start_ns)
        event = {"ph": "X", "pid": self._rank, "tid": lane, "ts": start, "dur": max(self.us(end_ns) - start, 0)}
        return event | {"name": name, "cat": category}

    def arrows(self, number: int, backward: Sequence[Span], block: BlockSpan, lane: int, wait: Span) -> list[_Event]:
        """Arrows from the instant at which the last gradient of a block was ready, over the block, to the wait that
        it ended.
        """
        number_before = bisect.bisect_right(backward, block.ready_ns, key=lambda span: span.start_ns)
        # An arrow's end must lie inside an event to be drawn, and events end before their last instant.
        ready = None
        if number_before:
            ready = min(self.us(block.ready_ns), self.us(backward[number_before - 1].end_ns) - 1)
        ends = [] if ready is None else [("s", _COMPUTE, ready)]
        ends += [("t" if ends else "s", lane, self.us(block.launch_ns)), ("f", _COMPUTE, self.us(wait.end_ns) - 1)]
        return [self._arrow(phase, number, at_lane, time_us) for phase, at_lane, time_us in ends]

    def _arrow(self, phase: str, number: int, lane: int, time_us: int) -> _Event:
        event = {"ph": phase, "pid": self._rank, "tid": lane, "ts": time_us, "id": number}
        return event | {"name": "waited for", "cat": "flow"} | ({"bp": "e"} if phase == "f" else {})

    def counter(self, time_us: int, value: int) -> _Event:
        return {"ph": "C", "pid": self._rank, "ts": time_us, "name": "bytes in flight", "args": {"bytes": value}}
