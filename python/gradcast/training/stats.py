"""The values of ``handle.stats()``."""

from typing import Any

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.training.measure.step_trace import StepTrace, median_ms
from gradcast.training.plan.controller import PlanController
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_exchange import GradientExchange

_KEYS = (
    "step", "mode", "world_size", "plan_version", "policy", "blocks", "bytes", "predicted_ms", "bound_ms",
    "measured_ms", "compute_ms", "exposed_ms", "update_calls", "gradient_buffer_bytes", "packed_bytes", "record_bytes",
    "engine_us_per_block", "grad_norm", "runs_as_ddp", "tries_ddp", "expected_gain", "measured_gain", "slowest_rank",
    "exposed", "wire", "wire_bytes", "clipping", "hosts", "waits", "alarms", "observed",
    "snapshots", "local_steps",
)  # fmt: skip


def base_stats(step: int, mode: str, group: Group, profile: _core.Profile | None) -> dict[str, Any]:
    """What every session knows; None for everything else. ``compute_ms``: the warm-up's backward + forward + update."""
    compute_ms = None if profile is None else compute_ns(profile) / 1e6
    known = {"step": step, "mode": mode, "world_size": group.world_size, "compute_ms": compute_ms}
    known["hosts"] = {"count": group.hosts.count, "ranks_per_host": group.hosts.ranks_per_host}
    return dict.fromkeys(_KEYS) | known


def plan_stats(
    controller: PlanController, exchange: GradientExchange, buffers: GradientBuffers, trace: StepTrace
) -> dict[str, Any]:
    """What a session with a plan knows besides.

    * ``measured_ms``, ``exposed_ms`` (the training thread's waiting), ``update_calls``: medians over the recorded steps
      of the plan in force.
    * ``expected_gain``, ``measured_gain``: the step time of DDP with its best bucket size over that of the plan.
    * ``runs_as_ddp``: the plan gains nothing, so gradients travel as DDP sends them. ``tries_ddp``: in this step.
    * ``slowest_rank``: a rank that computes at least a tenth longer than the others.
    * ``clipping`` (with max_grad_norm): ``certified_share`` of the last 64 steps, which did not wait for all gradients
      before forward; ``bound_over_norm``: median of the bound of the gradients' norm before any has arrived, over the
      norm.
    * ``exposed``: per stage (backward, loop, forward) how long it delays the group, in the median of the last 64 steps,
      and the rank that ends it last. The stages add up to the step of the slowest rank.
    * ``alarms``: those that last; ``observed``: the last step that alarms were judged by (gradcast/alarms.py).
    """
    agreed, compared, counters = controller.agreed, controller.comparison, exchange.counters()
    plan = agreed.in_force
    records = [record for record in trace.complete if record.plan is plan]
    values = {
        "plan_version": controller.version,
        "policy": plan.policy,
        "blocks": len(plan.blocks),
        "bytes": sum(block.size_bytes for block in plan.blocks),
        "wire": exchange.wire,
        "wire_bytes": exchange.wire_bytes(plan),
        "gradient_buffer_bytes": buffers.size_bytes,
        "packed_bytes": max((block.size_bytes for block in plan.blocks if len(block.ranges) > 1), default=0),
        "record_bytes": counters.record_bytes,
        "engine_us_per_block": counters.loop_ns / 1e3 / counters.blocks if counters.blocks else None,
        "runs_as_ddp": agreed.runs_as_baseline,
        "tries_ddp": controller.on_baseline and not agreed.runs_as_baseline,
        "expected_gain": None if agreed.expectation is None else agreed.expectation.gain,
        "measured_gain": compared.baseline_ns / compared.plan_ns if compared and compared.baseline_count else None,
        "slowest_rank": controller.slowest_rank,
        "exposed": controller.exposed.stats(),
        "measured_ms": median_ms([record.end_ns - record.start_ns for record in records]),
        "exposed_ms": median_ms([record.total_ns("wait") for record in records]),
        "update_calls": sorted(record.update_calls for record in records)[len(records) // 2] if records else None,
    }
    values |= controller.alarms.stats()
    if controller.profile is not None and controller.warmup is None:  # nothing is predicted for a warm-up's plans
        typical = agreed.typical_step
        values |= {"predicted_ms": typical.step_ns / 1e6, "bound_ms": typical.bound_ns / 1e6}
    return values
