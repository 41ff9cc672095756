"""Statistics of a session, as a plain dict."""

from typing import Any

from gradcast.training.measure.step_trace import median_ms

_KEYS = (
    "step", "mode", "world_size", "plan_version", "policy", "blocks", "bytes", "predicted_ms", "bound_ms",
    "measured_ms", "compute_ms", "exposed_ms", "update_calls", "gradient_buffer_bytes", "packed_bytes", "record_bytes",
    "engine_us_per_block", "grad_norm", "runs_as_ddp", "tries_ddp", "expected_gain", "measured_gain", "slowest_rank",
    "exposed", "wire", "wire_bytes",
)  # fmt: skip


def stats_of(session: Any) -> dict[str, Any]:
    """``measured_ms``, ``exposed_ms`` and ``update_calls`` are medians over the recorded steps of the plan in force;
    ``compute_ms`` is the warm-up's backward + forward + update; ``exposed_ms`` what the training thread waited.
    ``expected_gain`` and ``measured_gain``: how many times as fast as DDP with its best bucket size; ``runs_as_ddp``:
    that gains nothing, so gradients travel as DDP sends them; ``tries_ddp``: for this step; ``slowest_rank``: computes
    at least a tenth longer. ``exposed``: by stage (backward, loop, forward) how long it keeps the group, in the median
    of the last 64 steps, and the rank that is last at its end; the stages add up to the step of the slowest rank."""
    values: dict[str, Any] = dict.fromkeys(_KEYS)
    values |= {"step": session.steps, "mode": session.mode, "world_size": session.group.world_size}
    profile = session.profile
    if profile is not None:
        update_ns = sum(tensor.update_ns for tensor in profile.tensors)
        values["compute_ms"] = (profile.backward_ns + profile.forward_ns + update_ns) / 1e6
    if not session.has_plan:
        return values
    plan, counters = session.plan, session.exchange.counters()
    values |= {
        "plan_version": session.controller.version,
        "policy": plan.policy,
        "blocks": len(plan.blocks),
        "bytes": sum(block.size_bytes for block in plan.blocks),
        "wire": session.exchange.wire,
        "wire_bytes": session.exchange.wire_bytes(plan),
        "gradient_buffer_bytes": session.buffers.size_bytes,
        "packed_bytes": max((block.size_bytes for block in plan.blocks if len(block.ranges) > 1), default=0),
        "record_bytes": counters.record_bytes,
        "grad_norm": session.grad_norm,
        "engine_us_per_block": counters.loop_ns / 1e3 / counters.blocks if counters.blocks else None,
    }
    live = session.controller
    if profile is not None and live.warmup is None:  # of a warm-up's plans nothing is predicted
        typical = live.agreed.typical_step
        values |= {"predicted_ms": typical.step_ns / 1e6, "bound_ms": typical.bound_ns / 1e6}
    expectation, compared = live.agreed.expectation, live.comparison
    values |= {
        "runs_as_ddp": live.agreed.runs_as_baseline,
        "tries_ddp": live.on_baseline and not live.agreed.runs_as_baseline,
        "expected_gain": None if expectation is None else expectation.gain,
        "measured_gain": compared.plain_ns / compared.plan_ns if compared and compared.plain_count else None,
        "slowest_rank": live.slowest_rank,
        "exposed": live.exposed.stats(),
    }
    records = session.trace.finished(plan)
    values |= {
        "measured_ms": median_ms([record.end_ns - record.start_ns for record in records]),
        "exposed_ms": median_ms([record.total_ns("wait") for record in records]),
        "update_calls": sorted(record.update_calls for record in records)[len(records) // 2] if records else None,
    }
    return values
