"""One iteration of one cell, from a layer shape and a few named parameters.

Each method is the policy of the C++ core, set as the published runs had it, and played on a modelled network:

- WFBP-A2A: ``fifo``. Horovod with fusion off: one all-reduce per tensor.
- MG-WFBP: ``mgwfbp``, planned with the costs that are written into the program that was run, not with the network that
  is modelled here; then played on the latter.
- BSP-A2A: one all-reduce of everything after backward; the runs set a fusion threshold above either model's size.
- ByteScheduler-A2A: ``bytescheduler`` in overlap mode with a partition of 4 and a credit of 16 million parameters.
"""

import dataclasses
import math
from dataclasses import dataclass

from cells import Cell
from models import Model

from gradcast import Block, LinkModel, LinkPiece, Plan, Profile, Tensor, Timeline, _core, make_plan, play

# 10 Gbit/s, nothing taken off: with the payload of 1,500-byte frames (94 % of it) BERT-Base on 8 GPUs is out of reach
# even if an operation starts for free.
LINE_RATE_BYTES_PER_S = 1e10 / 8
GPUS_PER_NODE = 4
# The number of GPUs at which operation_ns is stated.
BASE_WORKER_COUNT = 8

BYTESCHEDULER = {"partition_bytes": 4 * 4e6, "credit_bytes": 4 * 16e6}
_PUBLISHED_NAMES = {4: "pcie-4", 8: "10gbe-8", 16: "10gbe-16", 32: "10gbe-32"}
# The program that was run multiplies its start-up cost at 32 GPUs by 3; the bundled value is without the factor.
_MGWFBP_ALPHA_FACTOR = {32: 3.0}


@dataclass(frozen=True)
class Parameters:
    """What the replay does not know. Everything else is published or comes from the layer shape."""

    # Network between nodes: a ring over all GPUs.
    wire_bytes_per_s: float = LINE_RATE_BYTES_PER_S
    # Start-up cost of one operation at 8 GPUs: latency of the ring and negotiation, which one number of GPUs cannot
    # tell apart.
    operation_ns: float = 0.0
    # Optimizer step that one GPU hides and several do not, per byte of the optimizer's memory traffic.
    update_ns_per_byte: float = 0.0
    # Slowdown of compute under communication: while the link is busy, compute advances at 1 / (1 + contention).
    contention: float = 0.0
    # ByteScheduler's own work per operation, on the link.
    scheduler_ns: float = 0.0

    def replace(self, **changes: float) -> "Parameters":
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Assumptions:
    """Choices that are not fitted. The defaults are the prediction; the rest is for the table of what they matter."""

    growth: str = "ring"  # how the start-up cost grows from 8 GPUs to more: a key of GROWTHS
    fused_bsp: bool = True
    mgwfbp_plans_with: str = "program"  # "program": the constants of the run; "network": the modelled network


def _published_alpha_ns(worker_count: int) -> float:
    return _core.network(_PUBLISHED_NAMES[worker_count]).link.all_reduce.pieces[0].alpha_ns


# Start-up cost at P GPUs in any unit; only ratios count.
GROWTHS = {
    "ring": lambda count: float(count - 1),
    "tree": lambda count: math.log2(count),
    "nodes": lambda count: float(count // GPUS_PER_NODE - 1),
    "published": _published_alpha_ns,
    "constant": lambda count: 1.0,
}


def network(parameters: Parameters, worker_count: int, assumptions: Assumptions | None = None) -> LinkModel:
    """What an all-reduce costs. One node is the published PCIe line: the fitted cells of 4 GPUs do not determine it."""
    if worker_count <= GPUS_PER_NODE:
        return _core.network("pcie-4").link
    growth = GROWTHS[(assumptions or Assumptions()).growth]
    hop_count = 2 * (worker_count - 1)
    alpha_ns = parameters.operation_ns * growth(worker_count) / growth(BASE_WORKER_COUNT)
    hop = _core.Hop(latency_ns=alpha_ns / hop_count, bandwidth_bytes_per_s=parameters.wire_bytes_per_s)
    return _core.ring_link(hop, worker_count)


def _with_alpha(link: LinkModel, *, factor: float = 1.0, more_ns: float = 0.0) -> LinkModel:
    return LinkModel(
        all_reduce=[
            LinkPiece(
                alpha_ns=piece.alpha_ns * factor + more_ns,
                beta_ns_per_byte=piece.beta_ns_per_byte,
                up_to_bytes=piece.up_to_bytes,
            )
            for piece in link.all_reduce.pieces
        ]
    )


def _mgwfbp_planning_link(worker_count: int) -> LinkModel:
    link = _core.network(_PUBLISHED_NAMES[worker_count]).link
    return _with_alpha(link, factor=_MGWFBP_ALPHA_FACTOR.get(worker_count, 1.0))


def _plan(profile: Profile, link: LinkModel, cell: Cell, assumptions: Assumptions) -> Plan:
    if cell.method == "WFBP-A2A":
        return make_plan(profile, link, policy="fifo", mode="hook")
    if cell.method == "MG-WFBP":
        known = assumptions.mgwfbp_plans_with == "program"
        return make_plan(
            profile, _mgwfbp_planning_link(cell.worker_count) if known else link, policy="mgwfbp", mode="hook"
        )
    if cell.method == "ByteScheduler-A2A":
        return make_plan(profile, link, policy="bytescheduler", mode="overlap", parameters=BYTESCHEDULER)
    return _bsp_plan(profile, assumptions.fused_bsp)


def _bsp_plan(profile: Profile, fused: bool) -> Plan:
    """Everything after backward. Unfused, the block that is ready last goes first, and the others queue behind it."""
    total_bytes = sum(tensor.bytes for tensor in profile.tensors)
    if fused:
        return Plan(blocks=[Block(ranges=[(0, total_bytes)])], policy="bsp", mode="hook")
    blocks, low = [], 0
    for tensor in profile.tensors:
        blocks.append(Block(ranges=[(low, low + tensor.bytes)]))
        low += tensor.bytes
    return Plan(blocks=blocks, policy="bsp", mode="hook")


def _stretched(profile: Profile, backward_factor: float, forward_factor: float) -> Profile:
    return Profile(
        name=profile.name,
        forward_ns=profile.forward_ns * forward_factor,
        backward_ns=profile.backward_ns * backward_factor,
        tensors=[
            Tensor(
                name=tensor.name,
                bytes=tensor.bytes,
                ready_ns=tensor.ready_ns * backward_factor,
                need_ns=tensor.need_ns * forward_factor,
                update_ns=tensor.update_ns,
            )
            for tensor in profile.tensors
        ],
    )


def _busy_ns(timeline: Timeline, low_ns: float, high_ns: float) -> float:
    """How long the link works between two times. Blocks do not overlap: one is in flight."""
    return sum(max(0.0, min(block.finish_ns, high_ns) - max(block.launch_ns, low_ns)) for block in timeline.blocks)


def _play_contended(profile: Profile, link: LinkModel, plan: Plan, contention: float) -> float:
    """Plays with compute stretched by the communication that runs beside it, spread evenly over each pass.

    Stretch and overlap determine each other. More stretch means more overlap, which the link's work limits, so the
    repetition rises to a fixed point.
    """
    # In d of time beside the link, compute advances d / (1 + c): it loses d * c / (1 + c).
    lost = contention / (1 + contention)
    played, timeline = profile, play(profile, link, plan)
    for _ in range(100):
        end_ns = timeline.iteration_ns
        backward_busy_ns = _busy_ns(timeline, 0.0, played.backward_ns)
        forward_busy_ns = _busy_ns(timeline, played.backward_ns, end_ns) if plan.mode == "overlap" else 0.0
        # Where forward stands still, nothing can be slowed.
        forward_busy_ns = min(forward_busy_ns, played.forward_ns)
        played = _stretched(
            profile,
            1 + lost * backward_busy_ns / profile.backward_ns,
            1 + lost * forward_busy_ns / profile.forward_ns,
        )
        timeline = play(played, link, plan)
        if abs(timeline.iteration_ns - end_ns) < 1e-9 * end_ns:
            break
    return timeline.iteration_ns


def iteration_ns(model: Model, cell: Cell, parameters: Parameters, assumptions: Assumptions | None = None) -> float:
    """The predicted time of one iteration of the cell, ns."""
    assumptions = assumptions or Assumptions()
    profile = model.profile(cell.compute_ns, update_ns_per_byte=parameters.update_ns_per_byte)
    link = network(parameters, cell.worker_count, assumptions)
    if cell.method == "ByteScheduler-A2A":
        link = _with_alpha(link, more_ns=parameters.scheduler_ns)
    plan = _plan(profile, link, cell, assumptions)
    if parameters.contention == 0:
        return play(profile, link, plan).iteration_ns
    return _play_contended(profile, link, plan, parameters.contention)


def error(model: Model, cell: Cell, parameters: Parameters, assumptions: Assumptions | None = None) -> float:
    """Predicted over measured samples per second, less 1."""
    predicted = cell.samples_per_s_at(iteration_ns(model, cell, parameters, assumptions))
    return predicted / cell.samples_per_s - 1
