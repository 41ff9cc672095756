"""Merges the traces of all ranks into one on rank 0's clock. Pure: events in, Chrome's JSON as a dict out
(docs/guide/report.md).

Each rank sends its events as a ``RankTrace``: numbers only, with the description of each block once in a table. So a
step of 30 blocks is a few kB, and tensor names stand in the merged trace once, not with every block of every step. Each
rank becomes a process with the lanes "steps", "compute" and "link". Blocks that are in flight together get lanes of
their own ("link 2"), because events of one lane must nest.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

# Shorter spans are omitted: checks for arrivals at every parameter that is read, which take some microseconds and would
# be most of the events.
_SHORTEST_NS = 20_000
_STEPS, _COMPUTE, _LINK = 0, 1, 2

_Event = dict[str, Any]
T = TypeVar("T")


class Clock(NamedTuple):
    """Maps a rank's own clock to rank 0's. ``drift`` is the ns that it gains on rank 0's per ns of its own."""

    offset_ns: float = 0.0
    drift: float = 0.0
    at_ns: int = 0

    def aligned(self, own_ns: int) -> int:
        """Converts a time of the rank's own clock to rank 0's clock."""
        return round(own_ns - self.offset_ns - self.drift * (own_ns - self.at_ns))


class Step(NamedTuple):
    number: int
    start_ns: int
    end_ns: int


class Span(NamedTuple):
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


@dataclasses.dataclass
class RankTrace:
    """The record of one rank, on its own clock. ``table`` has the bytes, tensors and reason of each kind of block."""

    rank: int
    host: str = ""
    clock: Clock = dataclasses.field(default_factory=Clock)
    steps: list[Step] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    blocks: list[BlockSpan] = dataclasses.field(default_factory=list)
    table: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def aligned(self) -> "RankTrace":
        """Returns the trace on rank 0's clock."""
        to = self.clock.aligned
        return dataclasses.replace(
            self,
            clock=Clock(),
            steps=[Step(number, to(start), to(end)) for number, start, end in self.steps],
            spans=[Span(kind, to(start), to(end)) for kind, start, end in self.spans],
            blocks=[BlockSpan(*block[:3], *(to(time_ns) for time_ns in block[3:])) for block in self.blocks],
        )


def compact(timeline: dict[str, Any]) -> RankTrace:
    trace = RankTrace(timeline["distributedInfo"]["rank"])
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
    """Returns Chrome's JSON as a dict; ``gradcast.diagnosis.trace.files.save`` writes it. REQUIRES: there is a rank."""
    table, ordered = _with_common_table([rank.aligned() for rank in sorted(ranks, key=lambda each: each.rank)])
    made = _Events(table, _first_ns(ordered))
    for rank in ordered:
        made.add_rank(rank)
    # Of one rank only: the same blocks are in flight on all of them, as far as the lanes show, and counters of all
    # ranks would be half of the file.
    made.add_bytes_in_flight(ordered[0])
    return {
        "schemaVersion": 1,
        "distributedInfo": {"rank": ordered[0].rank, "world_size": len(ordered)},
        "displayTimeUnit": "ms",
        "gradcast": {"start_ns": made.zero_ns, "hosts": [rank.host for rank in ordered], "blocks": table},
        "traceEvents": made.events,
    }


def _with_common_table(ranks: Sequence[RankTrace]) -> tuple[list[dict[str, Any]], list[RankTrace]]:
    """Merges the ranks' tables, since ranks follow the same plans, and refers their blocks to it."""
    table: list[dict[str, Any]] = []
    known: dict[tuple, int] = {}
    found = []
    for rank in ranks:
        entries = [_entry(table, known, line) for line in rank.table]
        blocks = [block._replace(entry=entries[block.entry]) for block in rank.blocks]
        found.append(dataclasses.replace(rank, blocks=blocks))
    return table, found


def _first_ns(ranks: Sequence[RankTrace]) -> int:
    """Returns the start of the trace. Times relative to it have few digits."""
    starts = [step.start_ns for rank in ranks for step in rank.steps]
    starts += [span.start_ns for rank in ranks for span in rank.spans]
    starts += [min(block.ready_ns, block.launch_ns) for rank in ranks for block in rank.blocks]
    return min(starts, default=0)


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


def in_lanes(items: Sequence[T], ends: Callable[[T], tuple[float, float]]) -> list[list[T]]:
    """Distributes the items over as few lanes as possible without overlap; each goes to the first free lane."""
    lanes: list[list[T]] = []
    for item in sorted(items, key=ends):
        start = ends(item)[0]
        free = next((lane for lane in lanes if ends(lane[-1])[1] <= start), None)
        if free is None:
            lanes.append([item])
        else:
            free.append(item)
    return lanes


def nested(spans: Sequence[Span]) -> list[Span]:
    """Cuts spans so that each lies inside or outside of every other: clocks are read one after the other."""
    open_ends: list[int] = []
    cut = []
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        while open_ends and open_ends[-1] <= span.start_ns:
            open_ends.pop()
        end_ns = min(span.end_ns, open_ends[-1]) if open_ends else span.end_ns
        open_ends.append(end_ns)
        cut.append(span._replace(end_ns=end_ns))
    return cut


class _Events:
    """Collects the events. Times are whole microseconds, which keeps the order and so the nesting."""

    def __init__(self, table: list[dict[str, Any]], zero_ns: int) -> None:
        self.events: list[_Event] = []
        self.zero_ns, self._table = zero_ns, table
        self._described: set[int] = set()
        self._arrows = itertools.count(1)

    def add_rank(self, rank: RankTrace) -> None:
        lanes = in_lanes(rank.blocks, lambda block: (block.launch_ns, block.finish_ns))
        links = [f"link {lane + 1}" if lane else "link" for lane in range(len(lanes))]
        self._name(rank.rank, 0, "process_name", f"rank {rank.rank}" + (f" on {rank.host}" if rank.host else ""))
        for lane, name in enumerate(["steps", "compute", *links]):
            self._name(rank.rank, lane, "thread_name", name)
        for step in rank.steps:
            self._span(rank.rank, _STEPS, f"ProfilerStep#{step.number}", "step", *step[1:])
        spans = nested([span for span in rank.spans if span.end_ns - span.start_ns >= _SHORTEST_NS])
        for span in spans:
            self._span(rank.rank, _COMPUTE, span.kind, "compute", *span[1:])
        lane_of = {}
        for lane, blocks in enumerate(lanes, _LINK):
            for block in blocks:
                lane_of[block] = lane
                args = self._arguments(block.entry)
                self._span(rank.rank, lane, f"block {block.block}", "block", block.launch_ns, block.finish_ns, args)
        backward = [span for span in spans if span.kind == "backward"]
        for span, block in _waited_for(spans, rank.blocks):
            self._arrow(rank.rank, backward, block, lane_of[block], span)

    def add_bytes_in_flight(self, rank: RankTrace) -> None:
        """A counter with one value per change. Launches at the instant of a finish are the same change."""
        changes: dict[int, int] = {}
        for block in rank.blocks:
            size = self._table[block.entry]["bytes"]
            for time_ns, change in ((block.launch_ns, size), (block.finish_ns, -size)):
                changes[self._us(time_ns)] = changes.get(self._us(time_ns), 0) + change
        value = 0
        for time_us in sorted(changes):
            value += changes[time_us]
            event = {"ph": "C", "pid": rank.rank, "ts": time_us, "name": "bytes in flight", "args": {"bytes": value}}
            self.events.append(event)

    def _us(self, time_ns: int) -> int:
        return (time_ns - self.zero_ns) // 1000

    def _arguments(self, entry: int) -> dict[str, Any]:
        """Names stand only with the first of these blocks."""
        line = self._table[entry]
        is_first = entry not in self._described
        self._described.add(entry)
        return {key: line[key] for key in (("bytes", "tensors", "reason") if is_first else ("bytes",))}

    def _name(self, rank: int, lane: int, kind: str, name: str) -> None:
        self.events.append({"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": {"name": name}})

    def _span(
        self, rank: int, lane: int, name: str, category: str, start_ns: int, end_ns: int, args: dict | None = None
    ) -> None:
        start = self._us(start_ns)
        event = {"ph": "X", "pid": rank, "tid": lane, "ts": start, "dur": max(self._us(end_ns) - start, 0)}
        self.events.append(event | {"name": name, "cat": category} | ({} if args is None else {"args": args}))

    def _arrow(self, rank: int, backward: Sequence[Span], block: BlockSpan, lane: int, wait: Span) -> None:
        """An arrow from a block's last gradient, over the block, to the wait that it ended."""
        places = [(lane, self._us(block.launch_ns)), (_COMPUTE, self._us(wait.end_ns) - 1)]
        number_before = bisect.bisect_right(backward, block.ready_ns, key=lambda span: span.start_ns)
        if number_before:
            # An arrow's end must lie inside an event to be drawn, and events end before their last instant.
            end_us = self._us(backward[number_before - 1].end_ns) - 1
            places.insert(0, (_COMPUTE, min(self._us(block.ready_ns), end_us)))
        number = next(self._arrows)
        for phase, (at_lane, time_us) in zip("stf" if number_before else "sf", places, strict=True):
            event = {"ph": phase, "pid": rank, "tid": at_lane, "ts": time_us, "id": number}
            self.events.append(event | {"name": "waited for", "cat": "flow"} | ({"bp": "e"} if phase == "f" else {}))
