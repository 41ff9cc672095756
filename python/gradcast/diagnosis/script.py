"""Runs a user's training script unchanged, with a doctor watching. Its exit code and its errors stay its own."""

import functools
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

from gradcast.diagnosis.doctor import Doctor
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.preconditions import obstacle, updates
from gradcast.errors import Error
from gradcast.training import observe


class TrainingFinder:
    """Finds the DistributedDataParallel module that a script trains, and its optimizers, and starts the doctor."""

    def __init__(self, doctor: Doctor) -> None:
        self._doctor = doctor
        self.modules: list[weakref.ref[DistributedDataParallel]] = []
        self._stepped: list[Optimizer] = []
        self.obstacle: str | None = None
        self._init = DistributedDataParallel.__init__
        DistributedDataParallel.__init__ = self._recording(self._init)
        self._handle: Any = register_optimizer_step_pre_hook(self._before_step)

    @property
    def is_sharded(self) -> bool:
        updated = (each for it in self._stepped for group in it.param_groups for each in group["params"])
        return not self.modules and any(map(observe.is_part, updated))

    def close(self) -> None:
        DistributedDataParallel.__init__ = self._init
        self._handle.remove()

    def _recording(self, init: Any) -> Any:
        @functools.wraps(init)
        def recording(ddp: DistributedDataParallel, *arguments: Any, **keywords: Any) -> None:
            init(ddp, *arguments, **keywords)
            if self._doctor.observer is None:  # the doctor makes wrappers of its own later
                self.modules.append(weakref.ref(ddp))

        return recording

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._doctor.observer is not None or self.obstacle is not None:
            return
        if optimizer not in self._stepped:
            self._stepped.append(optimizer)
            return
        # An optimizer steps for the second time, so all that take part in a step are known. If several modules are
        # trained, the largest one is diagnosed.
        for ddp in sorted(filter(None, (each() for each in self.modules)), key=_size, reverse=True):
            optimizers = [each for each in self._stepped if updates(each, ddp.module)]
            if optimizers:
                self.obstacle = obstacle(ddp, optimizers)
                if self.obstacle is None:
                    self._doctor.watch(ddp, optimizers)
                return


def run(path: str, arguments: Sequence[str], outcome: Outcome, **options: Any) -> None:
    """Runs ``path`` as ``python path arguments`` would, with the doctor's ``options``. Raises its SystemExit."""
    if not Path(path).is_file():
        raise Error(f"the script {path} does not exist; write `gradcast doctor train.py --its-own-options`")
    # The baseline is the script without gradcast, even if it attaches gradcast itself.
    observe.leave_to_ddp()
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    doctor = Doctor(outcome, **options)
    finder = TrainingFinder(doctor)
    try:
        runpy.run_path(path, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _print_traceback(error)
        raise SystemExit(1) from None
    finally:
        finder.close()
        doctor.close()
        if not doctor.done:
            outcome.fail(_why_no_diagnosis(path, doctor, finder))


def _why_no_diagnosis(path: str, doctor: Doctor, finder: TrainingFinder) -> str:
    if finder.obstacle is not None:
        return finder.obstacle
    if doctor.observer is not None and not doctor.observer.steps and doctor.observer.optimizer_steps > 0:
        return (
            f"none of {doctor.observer.optimizer_steps} steps had a visible backward pass through the outputs of the "
            "DistributedDataParallel module. Either torch.compile wraps that module (compile the model inside it "
            "instead), or its outputs hold no tensors"
        )
    if doctor.observer is not None:
        return (
            f"{path} ended after {len(doctor.observer.steps)} of the {doctor.needed_steps} steps that the doctor "
            "observes; let it train longer, or ask for fewer steps with --steps"
        )
    if finder.is_sharded:
        return (
            f"{path} trains a module that FSDP shards, and the doctor knows DistributedDataParallel only. Attach "
            "gradcast: handle.stats()['exposed'] tells how long steps wait for the other replicas of a shard"
        )
    if finder.modules:
        return f"{path} ended before an optimizer of its DistributedDataParallel module had made two steps"
    return (
        f"{path} ended without a DistributedDataParallel module, so there was nothing to diagnose. Did it call "
        "init_process_group() and wrap its model? Start it with torchrun: the doctor does not see processes that the "
        "script starts itself"
    )


def _size(ddp: DistributedDataParallel) -> int:
    return sum(parameter.numel() for parameter in ddp.module.parameters())


def _print_traceback(error: BaseException) -> None:
    """Prints the traceback from the script's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
