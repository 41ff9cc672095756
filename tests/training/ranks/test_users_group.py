"""After attach nothing of gradcast travels on the program's groups: on a device, two communicators want one order."""

import contextlib
from unittest import mock

import pytest

import gradcast
from training.attached import attach, hosts_of
from training.needs import torch
from training.plan import test_adapt
from training.plan.test_adapt import STEPS_TO_ADAPT, USUAL_NS
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.handle import Handle

nn = torch.nn
dist = torch.distributed


@contextlib.contextmanager
def counted(groups):
    """How many operations each of these groups carries out from an attach to its detach."""
    counts, begun, attach_here, detach = [], [], gradcast.attach, Handle.detach

    def numbers():
        return [each._get_sequence_number_for_group() for each in groups]

    def attach_counted(*arguments, **options):
        handle = attach_here(*arguments, **options)
        begun[:] = numbers()
        return handle

    def detach_counted(handle, **options):
        handle.flush()
        counts.extend(now - before for now, before in zip(numbers(), begun, strict=True))
        detach(handle, **options)

    with mock.patch.object(gradcast, "attach", attach_counted), mock.patch.object(Handle, "detach", detach_counted):
        yield counts


class Training:
    def __init__(self, mode, process_group, **options):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.handle = attach(self.module, self.sgd, mode, process_group, **options)

    def steps(self, count=8, *, forwards=1, weight=None):
        for _ in range(count):
            self.sgd.zero_grad()
            with contextlib.nullcontext() if weight is None else self.handle.weight(weight):
                sum(self.module(torch.randn(4, 4)).square().mean() for _ in range(forwards)).backward()
            self.sgd.step()


def plain(rank, mode, process_group, _):
    training = Training(mode, process_group)
    training.steps()
    training.handle.detach()


def forwards_and_buffers(rank, mode, process_group, _):
    training = Training(mode, process_group)
    training.steps(forwards=2)
    training.handle.flush()
    training.handle.send_buffers()
    training.steps()
    training.handle.detach()


def weights(rank, mode, process_group, _):
    training = Training(mode, process_group)
    training.steps(weight=3)
    training.handle.detach()


def comparisons(rank, mode, process_group, _):
    training = Training(mode, process_group, compare_every=1)
    training.steps()
    training.handle.detach()


def snapshots(rank, mode, process_group, folder):
    training = Training(mode, process_group)
    taken = training.handle.snapshots(folder, every=3, signals=(), optimizer=training.sgd if mode == "hook" else None)
    training.steps(12)
    taken.close()
    assert list(folder.iterdir())
    training.handle.detach()


def checkpoint(rank, mode, process_group, _):
    training = Training(mode, process_group)
    training.steps()
    training.handle.flush()
    version = training.handle.plan_version
    training.handle.load_state_dict(training.handle.state_dict())
    assert training.handle.plan_version > version
    training.steps()
    training.handle.detach()


def alarm_and_new_plan(rank, mode, process_group, _):
    def facts_of(_, step, on_baseline):
        link_ns = USUAL_NS if step >= 40 else 0.5 * USUAL_NS
        return test_adapt.facts(step_ns=test_adapt.with_slower_baseline(on_baseline), link_ns=link_ns)

    raised = []
    steps = 40 + STEPS_TO_ADAPT + 1
    options = {"watch": gradcast.Watch(on_alarm=raised.append), "process_group": process_group}
    with hosts_of(1):
        found = test_adapt.train(rank, mode, steps, facts_of, **options)
    versions = [version for version, _, _ in found["seen"]]
    assert raised
    assert versions[-1] > versions[39]


def clipping(rank, mode, process_group, _):
    training = Training("overlap", process_group, clip=gradcast.Clip(norm=1e-3))
    training.steps()
    training.handle.detach()


def local_steps(rank, mode, process_group, _):
    module = nn.Linear(4, 2)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    local = gradcast.Options(local=gradcast.LocalSteps(2))
    handle = gradcast.attach(module, sgd, process_group=process_group, options=local)
    for _ in range(7):
        module(torch.ones(4, 4)).sum().backward()
        sgd.step()
    handle.end_round()
    handle.detach()


EACH_MODE = (plain, forwards_and_buffers, weights, comparisons, snapshots, checkpoint, alarm_and_new_plan)
FEATURES = {each.__name__: each for each in EACH_MODE}
OF_OVERLAP = {each.__name__: each for each in (clipping, local_steps)}


def run(rank, feature, mode, folder, is_part):
    """``is_part``: training is over a group beside that of all ranks."""
    part = dist.new_group([0, 1])
    with counted([dist.group.WORLD, part]) as counts:
        feature(rank, mode, part if is_part else None, folder)
    return [] if counts == [0, 0] else [f"operations on the group of all and on the other: {counts}"]


@pytest.mark.parametrize("is_part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2)
def test_nothing_travels_on_the_groups_of_the_program(rank, feature, mode, tmp_path, is_part):
    return run(rank, FEATURES[feature], mode, tmp_path, is_part)


@pytest.mark.parametrize("feature", OF_OVERLAP)
@on_ranks(2)
def test_nor_what_only_overlap_mode_has(rank, feature, tmp_path):
    return run(rank, OF_OVERLAP[feature], "overlap", tmp_path, True)
