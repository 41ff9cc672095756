"""One model of ``gradcast dev lab train``, in one of the ways that are compared."""

import gradcast
from training.needs import torch


def line():
    """A task of one layer."""
    from gradcast.lab.models import Task

    class Line(Task):
        def _make_module(self):
            return torch.nn.Linear(4, 4)

        def loss(self, output, targets):
            return torch.nn.functional.mse_loss(output, targets)

        def batches(self, first, count):
            return [(torch.ones(2, 4), torch.zeros(2, 4))] * count

    return Line()


def groups_of_variants(rank):
    from gradcast.lab.trainer import Trainer
    from gradcast.lab.variants import Variant

    groups = []
    for name, caps_mib in (("ddp", ()), ("ddp:4", (4.0,))):
        trainer = Trainer(Variant(name, "ddp", caps_mib), line())
        assert all(ms > 0 for ms in trainer.train(2))
        groups.append(trainer.called.process_group)
    return groups[0] is not groups[1] and torch.distributed.group.WORLD not in groups


def test_each_of_ddps_variants_has_connections_of_its_own(ranks):
    """TCP learns the link from what a connection has carried, so a shared one makes one variant faster by another."""
    assert all(ranks.run(2, groups_of_variants))


def turns(rank):
    from gradcast.lab.trainer import attached

    training, called = attached(line(), plan=gradcast.Planning(warmup_steps=3)), []
    training.before_step = lambda: called.append("before")
    training.after_step = lambda: called.append("after")
    times_ms = training.turn(3)
    assert called == ["before", "after"] * 3
    assert training.duration_s(2) > 0
    training.detach()
    return len(times_ms), training.step_count, len({loss.item() for loss in training.losses})


def test_the_first_step_of_a_turn_is_made_and_not_timed(ranks):
    assert ranks.run(2, turns) == [(2, 5, 5)] * 2
