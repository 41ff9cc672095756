"""Averages of weights read parameters whose update may be pending, with DDP's result bit for bit."""

import pytest

from training import compare
from training.needs import torch
from training.pool import on_ranks
from training.twins import Twins


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_averages_of_the_weights(rank, mode):
    """EMA by swa_utils after each step, evaluated in between, and batch norm statistics of the average at the end."""
    twins = Twins(rank, "convnet", "adamw foreach", mode=mode)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    models = [torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=decay) for module, _, _ in twins.each()]
    found = []
    for number in range(9):
        twins.step()
        for model, (module, _, _) in zip(models, twins.each(), strict=True):
            model.update_parameters(module)
        if number in (4, 6):
            inputs = twins.task.batch(9, number)[0]
            with torch.no_grad():
                found += compare.trees(models[1](inputs), models[0](inputs), "average")
    for model in models:
        torch.optim.swa_utils.update_bn([twins.task.batch(rank.index, n)[0] for n in range(3)], model)
    found += compare.modules(models[1].module, models[0].module)
    return found + twins.differences()


@on_ranks(2)
def test_stochastic_weight_averaging(rank):
    """SWALR and AveragedModel in their documented order."""
    twins = Twins(rank, "plain", "sgd fused")
    models = [torch.optim.swa_utils.AveragedModel(module) for module, _, _ in twins.each()]
    schedulers = [torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01) for _, optimizer, _ in twins.each()]
    for number in range(9):
        twins.step()
        for model, scheduler, (module, _, _) in zip(models, schedulers, twins.each(), strict=True):
            if number > 4:
                model.update_parameters(module)
                scheduler.step()
    return compare.modules(models[1].module, models[0].module) + twins.differences()
