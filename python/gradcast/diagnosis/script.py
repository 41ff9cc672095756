"""Runs somebody's training script as it is, with a doctor watching.

The script's exit code stays its own, and its errors are shown as Python shows them.
"""

import functools
import os
import runpy
import sys
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcast.diagnosis.doctor import LEFT_OUT_STEPS, Doctor, Settings
from gradcast.diagnosis.outcome import Outcome
from gradcast.errors import Error
from gradcast.training.disabled import VARIABLE as DISABLE_VARIABLE


class Finder:
    """Looks for a DistributedDataParallel module that is trained, and for its optimizers, in a program that knows
    nothing of this. The doctor begins with the first module whose optimizers have all made a step."""

    def __init__(self, doctor: Doctor) -> None:
        self._doctor = doctor
        self._modules: list[weakref.ref[DistributedDataParallel]] = []
        self._stepped: list[Optimizer] = []
        self.obstacle: str | None = None
        self._init = DistributedDataParallel.__init__
        DistributedDataParallel.__init__ = self._remembering(self._init)
        self._handle: Any = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        DistributedDataParallel.__init__ = self._init
        self._handle.remove()

    @property
    def found_module(self) -> bool:
        return bool(self._modules)

    def _remembering(self, init: Any) -> Any:
        @functools.wraps(init)
        def remembering(ddp: DistributedDataParallel, *arguments: Any, **keywords: Any) -> None:
            init(ddp, *arguments, **keywords)
            if not self._doctor.watches:  # the doctor's own come later
                self._modules.append(weakref.ref(ddp))

        return remembering

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._doctor.watches or self.obstacle is not None:
            return
        if optimizer not in self._stepped:
            self._stepped.append(optimizer)
            return
        # One steps for the second time: all that take part in a step are known.
        for ddp in filter(None, (each() for each in self._modules)):
            owned = {id(parameter) for parameter in ddp.module.parameters()}
            optimizers = [each for each in self._stepped if _holds(each, owned)]
            if optimizers:
                self._begin(ddp, optimizers)
                return

    def _begin(self, ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> None:
        if dist.get_world_size(ddp.process_group) == 1:
            self.obstacle = "there is one worker, so nothing travels and nobody waits; start two or more with torchrun"
            return
        self._doctor.begin(ddp, optimizers)


def run(path: str, arguments: Sequence[str], settings: Settings, outcome: Outcome) -> None:
    """``path`` as ``python path arguments`` would. Raises SystemExit with the script's own code, where it has one."""
    if not Path(path).is_file():
        raise Error(f"there is no script {path}; write `gradcast doctor train.py --its-own-options`")
    # What the script does by itself is diagnosed, and gradcast is one of the things that could help it.
    os.environ[DISABLE_VARIABLE] = "1"
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    doctor = Doctor(settings, outcome.arrived)
    finder = Finder(doctor)
    try:
        runpy.run_path(path, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, Error) and doctor.done:
            raise
        _show(error)
        raise SystemExit(1) from None
    finally:
        finder.close()
        doctor.close()
        if not doctor.done:
            outcome.nothing(_why_nothing(path, doctor, finder, settings))


def _why_nothing(path: str, doctor: Doctor, finder: Finder, settings: Settings) -> str:
    if finder.obstacle is not None:
        return finder.obstacle
    needed = LEFT_OUT_STEPS + settings.steps
    if doctor.watches:
        return (
            f"{path} ended after {doctor.steps} of the {needed} steps that the diagnosis watches; let it train for "
            "longer, or ask for fewer with --steps"
        )
    if finder.found_module:
        return f"{path} ended before an optimizer of its DistributedDataParallel module had made two steps"
    return (
        f"{path} ended without a DistributedDataParallel module: nothing was there that could be diagnosed. Did it "
        "call init_process_group() and wrap its model?"
    )


def _holds(optimizer: Optimizer, owned: set[int]) -> bool:
    return any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"])


def _show(error: BaseException) -> None:
    """The script's traceback, from its own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
