"""An update that raises is not forgotten: whoever goes on with its parameters hears of it, on every way there is."""

import contextlib
import signal

import pytest

import gradcast
from training.attached import error_of
from training.needs import torch
from training.pair import Side, differences, net
from training.pool import on_ranks


class Fails(torch.optim.SGD):
    """Its next update raises ``due`` if that is set; with ``pressed``, somebody presses Ctrl-C in the middle of it. Of
    the class, since an optimizer's own attributes are those of when ``step()`` was called."""

    due: BaseException | None = None
    pressed = False

    @torch.no_grad()
    def step(self, closure=None):
        error, Fails.due = Fails.due, None
        if error is not None:
            raise error
        if Fails.pressed:
            Fails.pressed = False
            signal.raise_signal(signal.SIGINT)
        return super().step(closure)


def begun(rank, error):
    """In overlap mode, with a plan, an update that raises due and its step() behind it."""
    side = Side("overlap", rank.index)
    module = net()
    optimizer = Fails(module.parameters(), lr=0.1)
    side.attach(module, optimizer)
    for _ in side.steps(module, optimizer):
        pass
    side.handle.flush()
    optimizer.zero_grad()
    module(side.batch(50)).square().sum().backward()
    optimizer.step()
    Fails.due = error
    return side, module, optimizer


WAYS = {
    "read": lambda side, module: module[0].weight.sum(),
    "forward": lambda side, module: module(side.batch(51)),
    "flush": lambda side, module: side.handle.flush(),
    "state_dict": lambda side, module: module.state_dict()["0.weight"].sum(),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_failed_update_raises_again_wherever_the_loop_goes_on(rank, way):
    """A loop that catches everything: nobody trains on with parameters that missed a step."""
    side, module, optimizer = begun(rank, torch.OutOfMemoryError("no memory for the update"))
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the update"):
        WAYS[way](side, module)
    for _ in range(2):
        with pytest.raises(gradcast.Error, match="update"):
            WAYS[way](side, module)
    _, words = error_of(lambda: (optimizer.zero_grad(), module(side.batch(51)).square().sum().backward()))
    assert "update" in words, "nor takes the next step"
    with contextlib.suppress(gradcast.Error):
        side.handle.detach()


def interrupted(side):
    module = net()
    optimizer = Fails(module.parameters(), lr=0.1, momentum=0.9)
    called = side.called(module, optimizer)
    for number in range(12):
        optimizer.zero_grad()
        Fails.pressed = number == 8 and side.name != "ddp"  # the update of the step before is still due
        try:
            out = called(side.batch(number))
            assert not Fails.pressed, "no update was due"
        except KeyboardInterrupt:
            out = called(side.batch(number))
        out.square().sum().backward()
        optimizer.step()
    return side.result(module)


@on_ranks(2)
def test_ctrl_c_leaves_no_update_half_done(rank):
    return differences(rank, interrupted, "overlap")
