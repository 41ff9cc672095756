"""Wrong use raises, on every rank, before any number is wrong; the sentence names what is at fault."""

from unittest import mock

import pytest

import gradcast
from training.needs import torch
from training.ours import Ours

default_hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
nn = torch.nn


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def second_attach(rank):
    module = nn.Linear(3, 3)
    gradcast.attach(module, sgd(module))
    gradcast.attach(module, sgd(module))


def second_attach_of_hook_mode(rank):
    module = nn.Linear(3, 3)
    gradcast.attach(module)
    gradcast.attach(module)


def second_attach_of_wrapper(rank):
    module = nn.Linear(3, 3)
    gradcast.attach(module)
    gradcast.attach(nn.parallel.DistributedDataParallel(module))


def same_optimizer_twice(rank):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    gradcast.attach(first, optimizer)


def optimizer_of_another_module(rank):
    gradcast.attach(nn.Linear(3, 3), sgd(nn.Linear(3, 3)))


def optimizer_of_a_part(rank):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    gradcast.attach(module, sgd(module[1]))


def optimizer_of_a_copy(rank):
    """A frequent slip: the module was copied, or moved, after the optimizer had been made."""
    module = nn.Linear(3, 3)
    optimizer = sgd(module)
    module.weight = nn.Parameter(torch.zeros(3, 3))
    gradcast.attach(module, optimizer)


def overlapping_optimizers(rank):
    module = nn.Linear(3, 3)
    gradcast.attach(module, [sgd(module), sgd(module)])


def no_optimizer(rank):
    module = nn.Linear(3, 3)
    gradcast.attach(module, module.parameters())


def no_module(rank):
    gradcast.attach([nn.Linear(3, 3)])


def lbfgs(rank):
    module = nn.Linear(3, 3)
    gradcast.attach(module, torch.optim.LBFGS(module.parameters()))


def nothing_to_train(rank):
    module = nn.Linear(3, 3).requires_grad_(False)
    gradcast.attach(module)


def empty_module(rank):
    gradcast.attach(nn.ReLU())


def lazy_module(rank):
    gradcast.attach(nn.LazyLinear(3))


def meta_device(rank):
    gradcast.attach(nn.Linear(3, 3, device="meta"))


def several_devices(rank):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    gradcast.attach(module)


def comm_hook_on_ddp(rank):
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    gradcast.attach(ddp)


def ignored_by_ddp(rank):
    module = nn.Linear(3, 3)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    gradcast.attach(nn.parallel.DistributedDataParallel(module))


def ignored_in_a_bare_module(rank):
    module = nn.Linear(3, 3)
    module._ddp_params_and_buffers_to_ignore = ["weight"]
    gradcast.attach(module, sgd(module))


def unknown_policy(rank):
    gradcast.attach(nn.Linear(3, 3), options=gradcast.Options(policy="fastest"))


def unknown_policy_parameter(rank):
    """Known when the options are: not only once the plan is made, minutes later."""
    gradcast.attach(nn.Linear(3, 3), options=gradcast.Options(policy="p3", policy_parameters={"slices": 3}))


def policy_of_other_operations(rank):
    gradcast.attach(nn.Linear(3, 3), options=gradcast.Options(policy="dear"))


def too_few_warmup_steps(rank):
    gradcast.Options(adapt=False, warmup_steps=0)


def wrong_type_of_option(rank):
    gradcast.Options(in_flight="two")


def negative_timeout(rank):
    gradcast.Options(timeout_s=-1)


def complex_parameter(rank):
    gradcast.attach(nn.Linear(3, 3, dtype=torch.complex64))


# function: (code, what the sentence must name)
AT_ATTACH = {
    second_attach: ("invalid_use", "attached"),
    second_attach_of_hook_mode: ("invalid_use", "attached"),
    second_attach_of_wrapper: ("invalid_use", "attached"),
    same_optimizer_twice: ("invalid_use", "not in the module"),
    optimizer_of_another_module: ("invalid_use", "optimizer"),
    optimizer_of_a_part: ("invalid_use", "0.weight"),
    optimizer_of_a_copy: ("invalid_use", "optimizer"),
    overlapping_optimizers: ("invalid_use", "weight"),
    no_optimizer: ("invalid_use", "Optimizer"),
    no_module: ("invalid_use", "Module"),
    lbfgs: ("invalid_use", "LBFGS"),
    nothing_to_train: ("invalid_use", "no parameter"),
    empty_module: ("invalid_use", "no parameter"),
    lazy_module: ("invalid_use", "weight"),
    meta_device: ("invalid_use", "meta"),
    several_devices: ("invalid_use", "device"),
    comm_hook_on_ddp: ("invalid_use", "hook"),
    ignored_by_ddp: ("invalid_use", "ignore bias"),
    ignored_in_a_bare_module: ("invalid_use", "ignore weight"),
    unknown_policy: ("invalid_option", "fastest"),
    unknown_policy_parameter: ("invalid_option", "slices"),
    policy_of_other_operations: ("invalid_option", "dear"),
    too_few_warmup_steps: ("invalid_option", "warmup_steps"),
    wrong_type_of_option: ("invalid_option", "in_flight"),
    negative_timeout: ("invalid_option", "timeout_s"),
    complex_parameter: ("invalid_use", "complex"),
}


def refusal_of(rank, name):
    function = {function.__name__: function for function in AT_ATTACH}[name]
    try:
        function(rank)
    except gradcast.Error as error:
        # Nothing of the refused attach may stand in the way of a right one.
        ours = Ours("plain", "sgd plain", rank.index)
        ours.train(range(3))
        ours.handle.detach()
        return error.code, str(error)
    return None, "it was accepted"


@pytest.mark.parametrize("function", AT_ATTACH, ids=lambda function: function.__name__)
def test_attach_refuses(ranks, function):
    code, fragment = AT_ATTACH[function]
    for found, message in ranks.run(2, refusal_of, function.__name__):
        assert found == code, message
        assert fragment in message
        assert message.count("\n") == 0


def unknown_option(rank):
    try:
        gradcast.Options(warm_up=3)
    except TypeError as error:
        return str(error)
    return "accepted"


def test_an_unknown_option_is_an_error_that_names_it(ranks):
    for message in ranks.run(2, unknown_option):
        assert "warm_up" in message


def backward_of_a_graph(rank, mode):
    """Without a device: that it is one and that a pass is being captured is given here."""
    from gradcast.training.compat import graph_capture

    module = nn.Linear(3, 3)
    handle = gradcast.attach(module, sgd(module) if mode == "overlap" else None)
    cuda = mock.Mock(type="cuda")
    refuse = graph_capture.refuse_capture
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(graph_capture, "refuse_capture", side_effect=lambda _: refuse(cuda)),
        pytest.raises(gradcast.Error, match="captured in a CUDA graph"),
    ):
        module(torch.ones(2, 3)).sum().backward()
    # On another device nothing is captured, and the step goes on.
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        module(torch.ones(2, 3)).sum().backward()
    handle.flush()
    return module.weight.grad.flatten().tolist()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_pass_that_is_captured_in_a_graph_is_refused(ranks, mode):
    for gradient in ranks.run(2, backward_of_a_graph, mode):
        assert gradient == [2.0] * 9


def passes_of_a_graph(rank, mode):
    """Each is refused before anything is waited for."""
    from gradcast.training.compat import graph_capture

    module = nn.Linear(3, 3)
    handle = gradcast.attach(module, sgd(module) if mode == "overlap" else None)
    exchange = handle._session.exchange
    cuda = mock.Mock(type="cuda")
    refuse = graph_capture.refuse_capture
    loss = module(torch.ones(2, 3)).sum()
    again = module(torch.ones(2, 3)).sum()
    loss.backward()  # its gradients are still to be taken
    found = []
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(graph_capture, "refuse_capture", side_effect=lambda _: refuse(cuda)),
        mock.patch.object(exchange, "wait", side_effect=AssertionError),
        mock.patch.object(exchange, "wait_all", side_effect=AssertionError),
    ):
        for captured in (lambda: module(torch.ones(2, 3)), again.backward):
            with pytest.raises(gradcast.Error, match="captured in a CUDA graph"):
                captured()
            found.append(True)
    handle.flush()
    return found


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_capture_is_refused_before_it_would_wait(ranks, mode):
    assert ranks.run(2, passes_of_a_graph, mode) == [[True, True]] * 2
