"""The step message: the small numbers of a step are in the block of the gradient that is ready last."""

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from training.needs import torch

pytest.importorskip("training.needs")
from gradcast.training.options import Options, Planning
from gradcast.training.plan import candidates
from gradcast.training.step.step_message import MESSAGE_NAME, message_tensor
from training.pair import Training
from training.pool import on_ranks


def with_message(profile):
    tensors = profile.tensors
    size_bytes = message_tensor([torch.empty(1)] * len(tensors), with_norms=True).nbytes
    ready_ns, need_ns = max(each.ready_ns for each in tensors), tensors[0].need_ns
    message = tensors[0].replace(name=MESSAGE_NAME, bytes=size_bytes, update_ns=0, ready_ns=ready_ns, need_ns=need_ns)
    return profile.replace(tensors=[message, *tensors])


PROFILES = [gradcast.load_profile(name) for name in ("resnet50", "vgg16", "gpt2")]
LINKS = [link_of(alpha_ns, beta_ns) for alpha_ns in (3e4, 3e5, 3e6) for beta_ns in (0.5, 5.0, 14.0)]


POLICIES = {_core.DEFAULT_POLICY: {}, "fifo": {}, "p3": {}, "mgwfbp": {}, "ddp": {"first_bytes": 1, "cap_bytes": 1}}


@pytest.mark.parametrize("policy", POLICIES)
def test_no_plan_has_an_operation_more(policy, mode):
    """Not even where the last gradient closes a bucket of DDP's."""
    options = Options(plan=Planning(policy=policy, policy_parameters=POLICIES[policy]))
    for profile in PROFILES:
        for link in LINKS:
            plans = [candidates._made_plan(each, link, mode, options) for each in (profile, with_message(profile))]
            plans[1].check(with_message(profile))
            more = len(plans[1].blocks) - len(plans[0].blocks)
            assert more <= (policy == "p3"), "a slice, if the message fills one"
            assert plans[1].predicted_ns <= plans[0].predicted_ns * 1.001


@pytest.mark.parametrize("options", [{}, {"clip": gradcast.Clip(norm=1.0)}], ids=["", "clipping"])
@on_ranks(2)
def test_a_step_has_an_operation_for_each_parameter(rank, options):
    ours = Training(rank.index, "plain", "sgd plain", policy="fifo", **options)
    ours.train(5)
    count = sum(1 for _ in ours.module.parameters())
    assert len(ours.handle.plan.blocks) == count
    last = ours.handle.plan.blocks[-1]
    names = [place.name for place in ours.handle.layout if last.ranges[0][0] <= place.lo_bytes < last.ranges[-1][1]]
    return [] if names == [MESSAGE_NAME, "0.weight"] else names
