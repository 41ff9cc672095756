"""The values of ``handle.stats()``."""

from typing import Any

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.training.ranks.group import Group

# By group, for docs/reference/statistics.md.
MEANINGS = {
    "What runs": {
        "step": "optimizer steps since `attach`",
        "mode": '`"overlap"`, `"hook"`, `"local"` (local steps), or `"ddp"` under `GRADCAST_DISABLE`',
        "world_size": "ranks in the group",
        "hosts": "`count` and `ranks_per_host` (None if they differ): by torchrun's variables if all ranks have them, "
        "else by host name, boot and network namespace",
        "plan_version": "grows with each plan, those of the warm-up included",
        "policy": "which made the plan in force",
        "blocks": "per iteration",
        "bytes": "of gradients per iteration",
        "wire": 'wire format, lossy unless `"fp32"`',
        "wire_bytes": "bytes sent in it",
        "local_steps": 'the settings, the last decision of `LocalSteps(every="auto")` (`pace`: `step`, `gap`, `why`), '
        "`rounds` so far, `steps_in_round`, the fragments `in_flight`, `bytes_per_round`, and `state_bytes` kept "
        "beside the model; `measured_ms` and `exposed_ms` are then means over the last round",
    },
    "Times": {
        "measured_ms": "a step: median over the recorded steps of the plan in force",
        "predicted_ms": "a step as predicted for this plan; None during warm-ups",
        "bound_ms": "lower bound: no plan can be faster",
        "compute_ms": "backward + forward + update as the warm-up measured them",
        "exposed_ms": "wait of the training thread for the network, median per step; on a GPU an upper bound",
        "exposed": "by stage (`backward`, `loop`, `forward`): how long it delays the group, median of the last 64 "
        "steps, and the rank that ends it last; the stages add up to the slowest rank's step",
    },
    "Gain": {
        "expected_gain": "predicted speed as a multiple of DDP's with its best bucket size",
        "measured_gain": "the same from the trials of the DDP baseline during training",
        "runs_as_ddp": "gradients are sent as DDP sends them, because nothing is to be gained",
        "reduced_by_ddp": "DDP's own reducer sends them; gradcast looks again later, and what it measures is older",
        "tries_ddp": "they do so in this step, in a trial",
        "slowest_rank": "a rank that computes at least a tenth longer than the others",
    },
    "Alarms": {
        "alarms": "those that last, with the fields of `gradcast.alarms.Alarm`",
        "observed": "the last step that was judged: `step`, `step_ms` of the slowest rank, `compute_ms` and `data_ms` "
        "by rank, `link_ms` while blocks were in flight, `expected_ms`, `expected_link_ms`; `gradcast watch` reads it",
    },
    "Cost and memory": {
        "update_calls": "calls of the optimizer per step, median; updates run in parts",
        "engine_us_per_block": "CPU time of the engine's thread per block, in microseconds",
        "gradient_buffer_bytes": "the buffers that hold the gradients",
        "packed_bytes": "the largest packed block",
        "record_bytes": "the record of events",
        "grad_norm": "with `Clip(norm=...)`: norm before clipping, of the last step whose gradients have all arrived",
        "clipping": "with `Clip(norm=...)`: `certified_share` of the last 64 steps that overlap with forward, which "
        "did not wait for all gradients; `bound_over_norm`, the median bound of the norm before any gradient has "
        "arrived, over the norm",
    },
}
KEYS = [*(key for group in MEANINGS.values() for key in group), "snapshots", "waits"]


def base_stats(step: int, mode: str, group: Group, profile: _core.Profile | None) -> dict[str, Any]:
    """The values that every session knows; None for everything else."""
    compute_ms = None if profile is None else compute_ns(profile) / 1e6
    known = {"step": step, "mode": mode, "world_size": group.world_size, "compute_ms": compute_ms}
    known["hosts"] = {"count": group.hosts.count, "ranks_per_host": group.hosts.ranks_per_host}
    return dict.fromkeys(KEYS) | known
