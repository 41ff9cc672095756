"""A program that reads a parameter while its update is pending sees the finished value, without knowing of gradcast.

Each test reads on both sides of a pair of equal trainings (pair.py): on the side of gradcast at a moment when the
update cannot have run yet, on the side of DDP at the same step. Afterwards both sides train on and must stay equal.
"""

import copy
import dataclasses
import io
import pickle
import threading

import pytest

from gradcast.training.compat import extension
from gradcast.training.step import pending
from training import compare
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def evaluated(module, mode):
    training = module.training
    module.eval()
    with mode():
        inputs = torch.ones(3, 12)
        result = module(inputs)
    module.train(training)
    return result.clone()


def averaged(module, optimizer):
    average = torch.optim.swa_utils.AveragedModel(
        copy.deepcopy(module), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(module)
    average.update_parameters(module)
    return average.module.state_dict()


def state_after_state_dict(module, optimizer):
    optimizer.state_dict()
    return [optimizer.state[parameter] for parameter in module.parameters()]


READS = {
    "state_dict": lambda module, optimizer: module.state_dict(),
    "named_parameters": lambda module, optimizer: {n: p + 0 for n, p in module.named_parameters()},
    "save_module": lambda module, optimizer: saved_and_loaded(module).state_dict(),
    "save_optimizer": lambda module, optimizer: saved_and_loaded(optimizer.state_dict()),
    "pickle_module": lambda module, optimizer: pickle.loads(pickle.dumps(module)).state_dict(),
    "deepcopy_module": lambda module, optimizer: copy.deepcopy(module).state_dict(),
    "deepcopy_parameter": lambda module, optimizer: copy.deepcopy(list(module.parameters())),
    "evaluation_no_grad": lambda module, optimizer: evaluated(module, torch.no_grad),
    "evaluation_inference_mode": lambda module, optimizer: evaluated(module, torch.inference_mode),
    "evaluation_of_a_part": lambda module, optimizer: evaluated(module[0], torch.no_grad),
    "functional_form": lambda module, optimizer: torch.nn.functional.linear(
        torch.ones(1, 12), module[0].weight, module[0].bias
    ).detach(),
    "functional_call": lambda module, optimizer: torch.func.functional_call(
        module, dict(module.named_parameters()), (torch.ones(1, 12),)
    ).detach(),
    "moving_average": averaged,
    "data": lambda module, optimizer: [p.data.clone() for p in module.parameters()],
    "detach": lambda module, optimizer: [p.detach().clone() for p in module.parameters()],
    "numpy": lambda module, optimizer: [torch.tensor(p.detach().numpy().copy()) for p in module.parameters()],
    "numpy_of_data": lambda module, optimizer: [torch.tensor(p.data.numpy().copy()) for p in module.parameters()],
    "tolist": lambda module, optimizer: [p.tolist() for p in module.parameters()],
    "item": lambda module, optimizer: [p.flatten()[0].item() for p in module.parameters()],
    "repr": lambda module, optimizer: [repr(p) for p in module.parameters()],
    "foreach_norm": lambda module, optimizer: torch._foreach_norm([p.detach() for p in module.parameters()]),
    "cat_out": lambda module, optimizer: torch.cat([p.flatten() for p in module.parameters()]).detach(),
    "copy_from": lambda module, optimizer: torch.zeros(12, 12).copy_(module[0].weight.detach()),
    "index": lambda module, optimizer: module[0].weight[3:5, ::2].detach().clone(),
    "gradients": lambda module, optimizer: [p.grad.clone() for p in module.parameters()],
    "optimizer_state_dict": lambda module, optimizer: optimizer.state_dict(),
    "optimizer_state": state_after_state_dict,
    "optimizer_groups": lambda module, optimizer: [p.detach().clone() for p in optimizer.param_groups[0]["params"]],
}


@pytest.mark.parametrize("name", READS)
@on_ranks(2)
def test_a_read_sees_the_finished_value(rank, name):
    pair = Pair(rank)
    pair.train(4)
    pair.pending_step()
    values = [READS[name](side.module, side.optimizer) for side in pair.sides]
    found = compare.trees(values[1], values[0])
    del values  # whoever holds a parameter's memory gets its update inside of step()
    pair.train(2)
    pair.pending_step()
    return found + pair.differences()


@pytest.mark.parametrize("mode", ["train", "no_grad", pytest.param("eval", marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["transformer", "recurrent", "convnet"])
@on_ranks(2)
def test_a_forward_in_any_form_reads_finished_weights(rank, task, mode):
    """Attention and LSTM hand weights to functions; no hook of a module sees that."""
    pair = Pair(rank, task)
    pair.train(4)
    pair.pending_step()
    inputs = pair.ours.batch()[0]
    values = []
    for side in pair.sides:
        # Each rank evaluates with buffers of its own, as it does when it calls the module inside DDP.
        runs = side.module.eval() if mode == "eval" else side.forward
        with torch.enable_grad() if mode == "train" else torch.no_grad():
            values.append(runs(inputs).detach())
        side.module.train()
    found = compare.trees(values[1], values[0])
    return found + pair.differences()


class Padded(torch.nn.Module):
    """Each row is three tokens, of which the last one is masked."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(4, 10)

    def forward(self, x):
        tokens = x.unflatten(1, (3, 4))
        masked = torch.tensor([False, False, True]).expand(tokens.shape[:2])
        return self.head(self.encoder(tokens, src_key_padding_mask=masked)).flatten(1)


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_evaluation_chooses_the_kernels_that_it_chooses_without_gradcast(rank, wrap):
    """Those of torch's transformers ask whether a weight is of torch's own class; masked places get other values."""
    pair = Pair(rank, Padded, wrap=wrap)
    found = []
    for number in range(8):
        pair.pending_step()
        if number in (0, 1, 6, 7):
            found += compare.trees(*(evaluated(module, torch.no_grad) for module in reversed(pair.modules)))
    return found + pair.differences()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", ["adam foreach", "sgd fused"])
@on_ranks(2)
def test_zeroing_right_after_the_step_does_not_zero_what_travels(rank, set_to_none, optimizer):
    """The order of many loops: backward, step, zero_grad; so the gradients are pending when they are zeroed."""
    pair = Pair(rank, "plain", optimizer)
    for _ in range(6):
        pair.pending_step()
        for side in pair.sides:
            side.optimizer.zero_grad(set_to_none=set_to_none)
    left = [n for m in pair.modules for n, p in m.named_parameters() if p.grad is not None and p.grad.any()]
    return pair.differences() + left


@on_ranks(2)
def test_a_thread_that_flushes_in_the_middle_of_backward(rank):
    """A thread asks for the optimizer's state while backward runs, on one rank only."""
    pair = Pair(rank, "plain", "adam plain")
    middle = pair.ours.module[4]

    def ask(*_):
        if rank.index == 0:
            thread = threading.Thread(target=lambda: (pair.ours.optimizer.state_dict(), pair.handle.flush()))
            thread.start()
            thread.join()

    for number in range(10):
        hook = middle.register_full_backward_hook(ask) if number % 3 == 2 else None
        pair.step()
        if hook is not None:
            hook.remove()
    return pair.differences()


@dataclasses.dataclass(slots=True)
class Output:
    first: object
    second: object


def test_tensors_are_found_at_any_depth():
    one, two, three = torch.ones(3).unbind()
    found = pending.tensors_in([{"a": one}, Output(two, (4, {three}))])
    assert [id(each) for each in found] == [id(one), id(two), id(three)]


def test_which_entries_of_a_state_may_be_read_unasked():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = torch.optim.Adam(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    held = lambda: extension.load().entries_held(vars(optimizer))  # noqa: E731
    assert held() == set()
    kept = optimizer.state[parameters[0]]["exp_avg"], optimizer.state[parameters[1]]
    optimizer.state[parameters[2]]["more"] = [torch.ones(2)]
    assert held() == set(map(id, parameters[:3]))
    kept = optimizer.state
    assert held() == set(map(id, parameters))
    del kept
    assert held() == {id(parameters[2])}
