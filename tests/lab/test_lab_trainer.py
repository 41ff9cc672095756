"""One model of ``gradcast dev lab train``, in one of the ways that are compared."""

from training.needs import torch


def groups_of_variants(rank):
    from gradcast.lab.trainer import Trainer
    from gradcast.lab.variants import Variant

    groups = []
    for name, caps_mib in (("ddp", ()), ("ddp:4", (4.0,))):
        module = torch.nn.Linear(4, 4)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        trainer = Trainer(Variant(name, "ddp", caps_mib), module, sgd, torch.nn.functional.mse_loss)
        assert all(ms > 0 for ms in trainer.steps([(torch.ones(2, 4), torch.zeros(2, 4))] * 2))
        groups.append(trainer._model.process_group)
    return groups[0] is not groups[1] and torch.distributed.group.WORLD not in groups


def test_each_of_ddps_variants_has_connections_of_its_own(ranks):
    """TCP learns the link from what a connection has carried, so a shared one makes one variant faster by another."""
    assert all(ranks.run(2, groups_of_variants))
