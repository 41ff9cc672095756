"""Wrong use raises, on every rank, before any number is wrong; the sentence names what is at fault."""

import contextlib
import copy
import dataclasses
import inspect
import math
import pickle
from unittest import mock

import pytest

import gradcast
from training import compare
from training.attached import attach, error_of, not_refused
from training.inside import session_of
from training.needs import torch
from training.pair import Training
from training.pool import on_ranks

pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradcast.training.compat import graph_capture

nn = torch.nn


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def linear(**options):
    return nn.Linear(3, 3, **options)


def two():
    return nn.Sequential(linear(), linear())


def tied():
    one, other = linear(), linear()
    other.bias = one.bias
    return one, other


def whole_and_part():
    whole = two()
    return whole, whole[1]


def attached_twice(whole=lambda module: module, optimizer=lambda module: None):
    module = linear()
    gradcast.attach(module, optimizer(module))
    gradcast.attach(whole(module), optimizer(module))


def with_optimizer(module, optimizer):
    gradcast.attach(module, optimizer(module))


def optimizer_of_a_copy():
    """A frequent slip: the module was copied, or moved, after the optimizer had been made."""
    module = linear()
    optimizer = sgd(module)
    module.weight = nn.Parameter(torch.zeros(3, 3))
    gradcast.attach(module, optimizer)


def comm_hook_on_ddp():
    ddp = nn.parallel.DistributedDataParallel(linear())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    gradcast.attach(ddp)


def ignored_by_ddp():
    module = linear()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    gradcast.attach(nn.parallel.DistributedDataParallel(module))


def ignored_in_a_bare_module():
    module = linear()
    module._ddp_params_and_buffers_to_ignore = ["weight"]
    gradcast.attach(module, sgd(module))


# What is tried, and what the sentence must name.
AT_ATTACH = {
    "second attach": (lambda: attached_twice(optimizer=sgd), "attached to this module already"),
    "second attach in hook mode": (attached_twice, "attached to this module already"),
    "second attach of a wrapper": (
        lambda: attached_twice(nn.parallel.DistributedDataParallel),
        "attached to this module already",
    ),
    "optimizer of more": (
        lambda: with_optimizer(linear(), lambda m: sgd(nn.Sequential(m, two()))),
        "not in the module",
    ),
    "optimizer of another module": (lambda: with_optimizer(linear(), lambda _: sgd(linear())), "optimizer"),
    "optimizer of a part": (lambda: with_optimizer(two(), lambda m: sgd(m[1])), "0.weight"),
    "optimizer of a copy": (optimizer_of_a_copy, "optimizer"),
    "overlapping optimizers": (lambda: with_optimizer(linear(), lambda m: [sgd(m), sgd(m)]), "weight"),
    "class of optimizers": (
        lambda: with_optimizer(linear(), lambda _: torch.optim.SGD),
        "SGD(module.parameters(), ...)",
    ),
    "no optimizer": (lambda: with_optimizer(linear(), nn.Module.parameters), "Optimizer"),
    "no module": (lambda: gradcast.attach(linear), "a torch.nn.Module is expected"),
    "no modules": (lambda: gradcast.attach([]), "the list of modules is empty"),
    "no module in a list": (lambda: gradcast.attach([linear(), linear]), "number 1 of the list is a function"),
    "a parameter in a list": (lambda: gradcast.attach([linear(), linear().weight]), "the loss as an nn.Module"),
    "a DDP module in a list": (
        lambda: gradcast.attach([linear(), nn.parallel.DistributedDataParallel(linear())]),
        "plain modules",
    ),
    "a module and a part of it": (lambda: gradcast.attach(whole_and_part()), "number 1 is 0.1 as well"),
    "the same module twice": (lambda: gradcast.attach(2 * [linear()]), "number 1 is number 0 as well"),
    "modules with a common parameter": (lambda: gradcast.attach(tied()), "1.bias is 0.bias as well"),
    "a module of another list": (
        lambda: attached_twice(lambda module: [linear(), module]),
        "attached to this module already",
    ),
    "attach of a module around one": (
        lambda: attached_twice(lambda module: nn.Sequential(module)),
        "attached to 0.weight already, by another module",
    ),
    "lbfgs": (lambda: with_optimizer(linear(), lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS"),
    "nothing to train": (lambda: gradcast.attach(linear().requires_grad_(False)), "no parameter"),
    "empty module": (lambda: gradcast.attach(nn.ReLU()), "no parameter"),
    "lazy module": (lambda: gradcast.attach(nn.LazyLinear(3)), "weight"),
    "meta device": (lambda: gradcast.attach(linear(device="meta")), "meta"),
    "several devices": (lambda: gradcast.attach(nn.Sequential(linear(), linear(device="meta"))), "device"),
    "complex parameter": (lambda: gradcast.attach(linear(dtype=torch.complex64)), "complex"),
    "comm hook on ddp": (comm_hook_on_ddp, "hook"),
    "ignored by ddp": (ignored_by_ddp, "ignores bias"),
    "ignored in a bare module": (ignored_in_a_bare_module, "ignores weight"),
}


@pytest.mark.parametrize("name", AT_ATTACH)
@on_ranks(2)
def test_attach_refuses(rank, name):
    attempt, words = AT_ATTACH[name]
    found = not_refused(attempt, words)
    # Nothing of the refused attach may stand in the way of a right one.
    ours = Training(rank.index, "plain", "sgd plain")
    ours.train(1)
    ours.handle.detach()
    return found


Options, Planning, Clip, Watch = gradcast.Options, gradcast.Planning, gradcast.Clip, gradcast.Watch


@pytest.mark.parametrize(
    ("group", "settings", "named"),
    [
        (Planning, {"policy": "fastest"}, "options.plan.policy is 'fastest'; .* is expected"),
        (Planning, {"policy": "p3", "policy_parameters": {"slices": 3}}, "slices"),
        (Planning, {"policy": "dear"}, "dear.*needs other operations"),
        (Planning, {"warmup_steps": 0}, "warmup_steps"),
        (Planning, {"in_flight": "two"}, "in_flight"),
        (Watch, {"timeout_s": -1}, "timeout_s"),
        (Options, {"wire": "FP16"}, r"^options\.wire is 'FP16'; fp32, bf16, fp16 or int8 is expected$"),
        (Options, {"wire": ["bf16"]}, "wire is ..bf16.."),
        (Options, {"clip": None}, r"^options\.clip is None; a gradcast.Clip is expected$"),
        (Watch, {"on_alarm": "log"}, "on_alarm is 'log'; a function of an alarm is expected"),
        (Clip, {"norm_type": 1.0}, "without norm"),
        (Clip, {"norm": 1.0, "value": 1.0}, "choose one"),
        (Clip, {"norm": math.nan}, r"^options\.clip\.norm is nan; a number above 0 is expected$"),
        (Clip, {"value": -1}, "clip.value is -1"),
        (Clip, {"norm": 1.0, "norm_type": 0}, "norm_type is 0"),
        (Planning, {"warmup_steps": 10**9}, "at least 3 and at most 1000 is expected"),
        (Planning, {"in_flight": 10**12}, "at most 1024"),
        (Planning, {"in_flight": None}, "in_flight is None"),
        (Watch, {"timeline_steps": 10**9}, "at most 10000"),
        (Options, {"compare_every": 10**30}, "at most 1000000"),
        (gradcast.Nccl, {"max_ctas": 65}, "at most 64"),
        (Watch, {"timeout_s": 10**400}, "at most 604800"),
        (Watch, {"stall_warning_s": 1e9}, "at most 604800"),
        (Planning, {"file": 5}, "options.plan.file is 5; a path is expected"),
        (Watch, {"dump_dir": ["/tmp"]}, "dump_dir is .*; a path is expected"),
        (Planning, {"policy_parameters": [1]}, "policy_parameters is .*; a dict of numbers is expected"),
        (Planning, {"policy": "p3", "policy_parameters": {"slice_elements": "4"}}, "'4' for 'slice_elements'; a num"),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(group, settings, named):
    """Not only once the plan is made, minutes later."""
    with pytest.raises(gradcast.Error, match=named) as caught:
        group(**settings)
    assert caught.value.code == "invalid_option"


def test_an_unknown_option_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="warm_up"):
        Options(warm_up=3)


FORMER = {
    "plan=Planning": "plan:file warmup_steps policy policy_parameters in_flight adapt",
    "clip=Clip": "max_grad_norm:norm grad_norm_type:norm_type max_grad_value:value",
    "local=LocalSteps": "sync_every:every sync_every_max:every_max evaluate evaluate_metric outer outer_lr:lr "
    "outer_momentum:momentum outer_overlap:overlap outer_merge:merge inner",
    "nccl=Nccl": "max_ctas register_buffers",
    "watch=Watch": "timeout_s stall_warning_s dump_dir timeline_steps on_alarm",
}


@pytest.mark.parametrize("group", FORMER)
def test_a_former_name_answers_with_the_new_one(group):
    for former, _, new in (each.partition(":") for each in FORMER[group].split()):
        answer = "invalid_option", f"options.{former} is now {group}({new or former}=9)"
        assert error_of(lambda former=former: Options(**{former: 9})) == answer
        assert error_of(lambda former=former: dataclasses.replace(Options(), **{former: 9})) == answer


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ({"max_grad_norm": 1.0, "grad_norm_type": 1.0}, "clip=Clip(norm=1.0, norm_type=1.0)"),
        ({"sync_every": None, "max_grad_norm": None}, "local=None, clip=Clip()"),
        (
            {"sync_every": "auto", "evaluate_batch": torch.ones(2, 2)},
            "local=LocalSteps(every='auto', evaluate_batch=...)",
        ),
    ],
)
def test_several_former_names_are_answered_together(given, new):
    """Also in a pickle of before there were groups."""
    sentence = " and ".join(f"options.{name}" for name in given) + f" are now {new}"
    assert error_of(lambda: Options(**given))[1] == sentence
    assert error_of(lambda: Options.__new__(Options).__setstate__(given))[1] == sentence


def test_options_are_pickled_and_their_signature_is_shown():
    made = Options(clip=Clip(norm=2.0), plan=Planning(in_flight=3))
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert list(inspect.signature(Options).parameters) == [each.name for each in dataclasses.fields(Options)]


@contextlib.contextmanager
def captured():
    """Without a device: that it is one and that a pass is being captured is given here."""
    cuda, refuse = mock.Mock(type="cuda"), graph_capture.refuse_capture
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(graph_capture, "refuse_capture", side_effect=lambda _: refuse(cuda)),
    ):
        yield


@on_ranks(2)
def test_a_pass_that_is_captured_in_a_graph_is_refused(rank, mode):
    module = linear()
    handle = attach(module, sgd(module), mode)
    with captured(), pytest.raises(gradcast.Error, match="captured in a CUDA graph"):
        module(torch.ones(2, 3)).sum().backward()
    # On another device nothing is captured, and the step goes on.
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        module(torch.ones(2, 3)).sum().backward()
    handle.flush()
    return compare.trees(module.weight.grad.flatten().tolist(), [2.0] * 9, "gradient")


@on_ranks(2)
def test_a_capture_is_refused_before_it_would_wait(rank, mode):
    module = linear()
    handle = attach(module, sgd(module), mode)
    exchange = session_of(handle).exchange
    loss, again = (module(torch.ones(2, 3)).sum() for _ in range(2))
    loss.backward()  # its gradients are still to be taken
    with (
        captured(),
        mock.patch.object(exchange, "wait", side_effect=AssertionError),
        mock.patch.object(exchange, "wait_all", side_effect=AssertionError),
    ):
        for each in (lambda: module(torch.ones(2, 3)), again.backward):
            with pytest.raises(gradcast.Error, match="captured in a CUDA graph"):
                each()
    handle.flush()
