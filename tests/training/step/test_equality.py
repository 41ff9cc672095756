"""30 steps with gradcast equal a plain loop that reduces the same blocks, bit for bit.

The cases cover each model, kind and form of optimizer, number of ranks, mode, way to wrap, and kind of plan.
"""

from dataclasses import dataclass, field, replace

import pytest

import gradcast
from gradcast.training.step.step_message import MESSAGE_NAME
from training.attached import planning
from training.pair import Training
from training.plain import beside_plain_loop

STEPS = 30
# Slices small enough that these small models are cut.
CUT = planning("p3", slice_elements=300)


@dataclass(frozen=True)
class Case:
    task: str
    optimizer: str
    world_size: int
    mode: str
    wrap: bool = False
    plan: gradcast.Planning = field(default_factory=planning)
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task}-{self.optimizer.replace(' ', '_')}-{self.world_size}-{self.mode}"


CASES = [
    Case("convnet", "sgd foreach", 2, "overlap"),
    Case("convnet", "adamw fused", 3, "overlap", True, CUT),
    Case("convnet_last", "adam plain", 4, "hook", False, planning("fifo")),
    Case("transformer", "adam fused", 4, "overlap", False, CUT),
    Case("transformer", "adamw foreach", 2, "hook", True),
    Case("transformer", "sgd plain", 3, "overlap", False, planning("bytescheduler", in_flight=2)),
    Case("mixed64", "adam foreach", 3, "hook", False, CUT),
    Case("mixed64", "adamw plain", 4, "overlap"),
    Case("mixed16", "adam fused", 2, "overlap", False, planning("fifo")),
    Case("mixed16", "sgd foreach", 3, "hook", True),
    Case("recurrent", "sgd fused", 2, "overlap", False, replace(CUT, in_flight=3)),
    Case("odd", "adam plain", 3, "overlap", False, planning("p3", slice_elements=50)),
]


def train_both(rank, case, steps):
    """What is wrong, with what the ranks have followed; and the statistics."""
    plan = replace(case.plan, warmup_steps=6)
    ours = Training(rank.index, case.task, case.optimizer, mode=case.mode, wrap=case.wrap, plan=plan)
    found, losses, followed = beside_plain_loop(ours, case.optimizer, steps)
    # A step's loss shows the parameters after the step before it.
    found += [f"the loss of step {step} differs" for step, (ours, theirs) in enumerate(losses) if ours != theirs][:1]
    plans = [(*each[:2], [b.ranges for b in each.blocks], [p.name for p in each.layout]) for each in followed]
    found += [f"the ranks differ in {each}" for each in rank.gather("followed", plans) if each != plans]
    stats = ours.handle.stats()
    ours.handle.detach()
    require_that_the_plan_was_followed(case, followed)
    return found, stats


def require_that_the_plan_was_followed(case, followed):
    """Equality means little if training never left the warm-up, or if everything always went in one block."""
    policy = case.plan.policy
    warmup, planned = followed[:6], followed[6:]
    assert {each.policy for each in planned} == {policy}
    assert policy not in {each.policy for each in warmup}
    assert len({each.version for each in planned}) == 1
    assert planned[0].version > warmup[-1].version
    alone = [place for place in planned[-1].layout if place.name != MESSAGE_NAME]  # it shares a block
    more_blocks = len(planned[-1].blocks) - len(alone)
    assert policy != "p3" or more_blocks > 0, "no tensor was cut"
    assert policy != "fifo" or more_blocks == 0


# One with four ranks is enough for every change.
SLOW = {("convnet_last", 4), ("mixed64", 3), ("mixed64", 4), ("transformer", 3), ("transformer", 4)}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if (case.task, case.world_size) in SLOW else []) for case in CASES],
    ids=str,
)
def test_training_equals_a_plain_loop_bit_for_bit(ranks, case):
    for found, _ in ranks.run(case.world_size, train_both, case, STEPS, timeout_s=120):
        assert found == []


def test_a_tensor_of_100_mb_is_equal_bit_for_bit_and_not_copied(ranks):
    for found, stats in ranks.run(2, train_both, Case("large", "sgd fused", 2, "overlap"), 8, timeout_s=120):
        assert found == []
        assert stats["bytes"] > 5120 * 5120 * 4
        assert stats["packed_bytes"] == 0
        assert stats["record_bytes"] < 0.01 * stats["gradient_buffer_bytes"]
