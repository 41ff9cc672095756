"""What a step launches on a device for its small numbers: flags, signature, reports. They are copied there once, and
back once, beside the host."""

import collections
import contextlib
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from training.attached import Attached
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks
from training.step.test_late_device import counted_reads, late_device

pytest.importorskip("training.needs")
from gradcast.training.step import partial_step

nn = torch.nn
STEPS = 5
VIEWS = {"alias", "as_strided", "detach", "select", "slice", "split", "split_with_sizes", "unbind", "view"}


class Launches(TorchDispatchMode):
    """Counts operations, by name, on this memory and on what is computed from it."""

    def __init__(self, memory):
        super().__init__()
        self.first, self.end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        self.counts, self.derived = collections.Counter(), []

    def _is_on_device(self, tensor):
        return self.first <= tensor.data_ptr() < self.end or any(tensor is each for each in self.derived)

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        given = [each for each in torch.utils._pytree.tree_leaves((arguments, named)) if isinstance(each, torch.Tensor)]
        name = function.overloadpacket.__name__
        if name not in VIEWS and any(map(self._is_on_device, given)):
            self.counts[name] += 1
            made = [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]
            self.derived += [each for each in made if not self._is_on_device(each)]  # a view of it would be kept
        return found


@on_ranks(2)
def test_a_step_copies_its_small_numbers_once_each_way(rank, mode):
    with late_device(), counted_reads():
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        attached = Attached(module, mode)
        for _ in range(10):
            attached.step(torch.ones(4, 8))
        buffers = session_of(attached.handle).exchange.buffers
        # Updates leave the modes of the program, of which this is one.
        staying = mock.patch.object(partial_step, "_disable_current_modes", contextlib.nullcontext)
        with staying, Launches(buffers.views[len(list(module.parameters()))]) as launches:
            for _ in range(STEPS):
                attached.step(torch.ones(4, 8))
    attached.handle.flush()
    there, back = "copy_", "clone"  # which stands for a copy to the host
    assert launches.counts == {there: STEPS, back: STEPS}
