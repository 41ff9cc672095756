"""A module under gradcast with nothing around it, for tests of what is refused."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from unittest import mock

import gradcast
from training.needs import torch


@contextlib.contextmanager
def hosts_of(ranks_per_host: int) -> Iterator[None]:
    """As if torchrun had started so many ranks on each host."""
    places = zip(("GROUP_RANK", "LOCAL_RANK"), divmod(torch.distributed.get_rank(), ranks_per_host), strict=True)
    variables = {name: str(value) for name, value in [*places, ("LOCAL_WORLD_SIZE", ranks_per_host)]}
    with mock.patch.dict(os.environ, variables):
        yield


def planning(policy=gradcast.Planning.policy, *, warmup_steps=3, in_flight=1, adapt=False, **parameters):
    """A short warm-up and one plan for good. ``parameters``: of the policy."""
    return gradcast.Planning(None, warmup_steps, policy, parameters, in_flight, adapt)


def attach(
    module, optimizer, mode="overlap", process_group=None, *, policy=gradcast.Planning.policy, **options
) -> gradcast.Handle:
    """In hook mode without the optimizer. ``policy``: of ``planning()``, if the options name no plan.

    With a wire format each rank is on a host of its own, if nothing is said: on one host there is none.
    """
    chosen = gradcast.Options(**({} if "local" in options else {"plan": planning(policy)}) | options)
    optimizer = optimizer if mode == "overlap" else None
    is_untold = chosen.wire != "fp32" and "GROUP_RANK" not in os.environ
    with hosts_of(1) if is_untold else contextlib.nullcontext():
        return gradcast.attach(module, optimizer, process_group=process_group, options=chosen)


class Attached:
    def __init__(self, module, mode="overlap", **options):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.handle = attach(module, self.optimizer, mode, **options)

    def step(self, *inputs):
        self.optimizer.zero_grad()
        self.module(*inputs).sum().backward()
        self.optimizer.step()


def error_of(function):
    try:
        function()
    except gradcast.Error as error:
        return error.code, str(error)
    return None, "no error"


def not_refused(function: Callable, *words: str, code: str = "invalid_use") -> list[str]:
    """What is wrong with the Error that the function has to raise: its code, words that it lacks, or several lines."""
    found, message = error_of(function)
    is_right = found == code and all(word in message for word in words) and "\n" not in message
    return [] if is_right else [f"{found}: {message}"]


@contextlib.contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """What gradcast logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("gradcast")
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
