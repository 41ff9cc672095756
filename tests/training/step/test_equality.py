"""30 steps with gradcast equal a plain loop that reduces the same blocks, bit for bit.

The cases cover each model, kind and form of optimizer, number of ranks, mode, way to wrap, and kind of plan.
"""

from dataclasses import dataclass, field

import pytest

from training.ours import Ours
from training.plain import beside_plain_loop

STEPS = 30
# Slices small enough that these small models are cut.
CUT = {"policy": "p3", "policy_parameters": {"slice_elements": 300}}


@dataclass(frozen=True)
class Case:
    task: str
    optimizer: str
    world_size: int
    mode: str
    wrap: bool = False
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task}-{self.optimizer.replace(' ', '_')}-{self.world_size}-{self.mode}"


CASES = [
    Case("convnet", "sgd foreach", 2, "overlap"),
    Case("convnet", "adamw fused", 3, "overlap", True, CUT),
    Case("convnet_last", "adam plain", 4, "hook", False, {"policy": "fifo"}),
    Case("transformer", "adam fused", 4, "overlap", False, CUT),
    Case("transformer", "adamw foreach", 2, "hook", True),
    Case("transformer", "sgd plain", 3, "overlap", False, {"policy": "bytescheduler", "in_flight": 2}),
    Case("mixed64", "adam foreach", 3, "hook", False, CUT),
    Case("mixed64", "adamw plain", 4, "overlap"),
    Case("mixed16", "adam fused", 2, "overlap", False, {"policy": "fifo"}),
    Case("mixed16", "sgd foreach", 3, "hook", True),
    Case("recurrent", "sgd fused", 2, "overlap", False, CUT | {"in_flight": 3}),
    Case("odd", "adam plain", 3, "overlap", False, {"policy": "p3", "policy_parameters": {"slice_elements": 50}}),
]


def train_both(rank, case, steps):
    ours = Ours(case.task, case.optimizer, rank.index, mode=case.mode, wrap=case.wrap, warmup_steps=6, **case.options)
    found, losses = beside_plain_loop(rank, ours, case.optimizer, steps)
    stats = ours.handle.stats()
    ours.handle.detach()
    return {
        "stats": stats,
        "differences": found,
        "first_wrong_step": next((step for step, (ours, theirs) in enumerate(losses) if ours != theirs), None),
        "versions": [followed.plan_version for followed in ours.followed],
        "policies": [followed.policy for followed in ours.followed],
        "block_counts": [len(followed.blocks) for followed in ours.followed],
        "orders": [tuple(place.name for place in followed.layout) for followed in ours.followed],
    }


# One with four ranks is enough for every change.
SLOW = {("convnet_last", 4), ("mixed64", 4), ("transformer", 4)}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if (case.task, case.world_size) in SLOW else []) for case in CASES],
    ids=str,
)
def test_training_equals_a_plain_loop_bit_for_bit(ranks, case):
    results = ranks.run(case.world_size, train_both, case, STEPS, timeout_s=120)
    for result in results:
        # A step's loss shows the parameters after the step before it.
        assert result["first_wrong_step"] is None
        assert result["differences"] == []
    for key in ("versions", "policies", "block_counts", "orders"):
        assert all(result[key] == results[0][key] for result in results), f"the ranks differ in {key}"
    check_that_the_plan_was_followed(case, results[0])


def check_that_the_plan_was_followed(case, result):
    """Equality means little if training never left the warm-up, or if everything always went in one block."""
    policy = case.options.get("policy", "forecast")
    assert result["policies"][6:] == [policy] * (STEPS - 6)
    assert policy not in result["policies"][:6]
    assert len(set(result["versions"][6:])) == 1
    assert result["versions"][6] > result["versions"][5]
    if policy == "p3":
        assert result["block_counts"][-1] > len(result["orders"][-1]), "no tensor was cut"
    if policy == "fifo":
        assert result["block_counts"][-1] == len(result["orders"][-1])


LARGE_BYTES = 5120 * 5120 * 4


def test_a_tensor_of_100_mb_is_equal_bit_for_bit_and_not_copied(ranks):
    for result in ranks.run(2, train_both, Case("large", "sgd fused", 2, "overlap"), 8, timeout_s=120):
        assert result["differences"] == []
        assert result["policies"][-1] == "forecast"
        assert result["stats"]["bytes"] > LARGE_BYTES
        assert result["stats"]["packed_bytes"] == 0
        assert result["stats"]["record_bytes"] < 0.01 * result["stats"]["gradient_buffer_bytes"]
