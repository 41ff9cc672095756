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

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcast.diagnosis.doctor import Doctor, Settings, holds_any_of, obstacle
from gradcast.diagnosis.outcome import Outcome
from gradcast.errors import Error
from gradcast.training.disabled import VARIABLE as DISABLE_VARIABLE


class Finder:
    """Looks for a DistributedDataParallel module that is trained, and for its optimizers, in a program that knows
    nothing of this."""

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
        # One steps for the second time: all that take part in a step are known. Of several modules the largest.
        for ddp in sorted(filter(None, (each() for each in self._modules)), key=_size, reverse=True):
            optimizers = [each for each in self._stepped if holds_any_of(each, ddp.module)]
            if optimizers:
                self._begin(ddp, optimizers)
                return

    def _begin(self, ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> None:
        self.obstacle = obstacle(ddp, optimizers)
        if self.obstacle is None:
            self._doctor.begin(ddp, optimizers)


def run(path: str, arguments: Sequence[str], settings: Settings, outcome: Outcome) -> None:
    """``path`` as ``python path arguments`` would. Raises SystemExit with the script's own code, where it has one."""
    if not Path(path).is_file():
        raise Error(f"there is no script {path}; write `gradcast doctor train.py --its-own-options`")
    # What the script does by itself is diagnosed, and gradcast is one of the things that could help it.
    os.environ[DISABLE_VARIABLE] = "1"
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    doctor = Doctor(settings, outcome)
    finder = Finder(doctor)
    try:
        runpy.run_path(path, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _show(error)
        raise SystemExit(1) from None
    finally:
        finder.close()
        doctor.close()
        if not doctor.done:
            outcome.nothing(_why_nothing(path, doctor, finder))


def _why_nothing(path: str, doctor: Doctor, finder: Finder) -> str:
    if finder.obstacle is not None:
        return finder.obstacle
    if doctor.watches and doctor.steps == 0 and doctor.optimizer_steps > 0:
        return (
            f"in none of {doctor.optimizer_steps} steps a backward pass through the outputs of the "
            "DistributedDataParallel module was seen: torch.compile around that module (compile what is inside), or "
            "outputs that hold no tensors"
        )
    if doctor.watches:
        return (
            f"{path} ended after {doctor.steps} of the {doctor.needed_steps} steps that the diagnosis watches; let it "
            "train for longer, or ask for fewer with --steps"
        )
    if finder.found_module:
        return f"{path} ended before an optimizer of its DistributedDataParallel module had made two steps"
    return (
        f"{path} ended without a DistributedDataParallel module: nothing was there that could be diagnosed. Did it "
        "call init_process_group() and wrap its model? Start it with torchrun: processes that it starts itself are not "
        "seen"
    )


def _size(ddp: DistributedDataParallel) -> int:
    return sum(parameter.numel() for parameter in ddp.module.parameters())


def _show(error: BaseException) -> None:
    """The script's traceback, from its own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
