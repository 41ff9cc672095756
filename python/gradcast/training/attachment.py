"""What stays on a module from ``attach`` to ``detach``: the hooks around its forward pass and the session of the day.

A session is made for a set of parameters. When that changes (a layer is thawed or added), the next one begins, with a
warm-up of its own. While ranks run out of inputs (``ddp.join()``), DDP reduces by itself.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training import checks, forking
from gradcast.training.compiled import CompiledBlocks
from gradcast.training.ddp import TakenOver
from gradcast.training.group import Group
from gradcast.training.module_hooks import around_forward
from gradcast.training.options import Options
from gradcast.training.session import Session
from gradcast.training.structure import Structure

_log = logging.getLogger("gradcast")


class Attachment:
    """Of a module to two or more workers."""

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        group: Group,
        options: Options,
    ) -> None:
        self._module, self._optimizers, self._group, self._options = module, list(optimizers), group, options
        self.session = Session(module, parameters, optimizers, group, options)
        self._failure: Error | None = None  # in beginning again; nothing synchronizes the module since
        self._structure = Structure(module, optimizers, parameters.values())
        self._compiled = CompiledBlocks(module)
        self._taken_over = None
        if isinstance(module, DistributedDataParallel):
            self._taken_over = TakenOver(module, self._joining, self._joined)
        self._hooks = around_forward(module, self._before_forward, self._after_forward)
        forking.watch(self)

    @property
    def released(self) -> bool:
        """Whether nothing of gradcast is on the module, or this is a forked child, which it leaves alone."""
        return self.session.released and self._failure is None

    def release(self) -> None:
        """The module, its optimizers and DDP are as they were."""
        self._failure = None
        for hook in self._hooks:
            hook.remove()
        self._compiled.release()
        if not self.session.released:
            self.session.release()
        if self._taken_over is not None:
            self._taken_over.give_back()

    def _before_forward(self, _: Any, compiled: bool) -> None:
        if self._failure is not None:
            raise self._failure
        if self.session.released:  # in a forked child
            return
        if self._taken_over is not None:
            self._taken_over.before_forward()
        if torch.is_grad_enabled() and self._structure.changed():
            self._begin_again()
        if not compiled:
            self._compiled.find()
        self.session.before_forward(compiled)

    def _after_forward(self, output: Any, _: bool) -> None:
        if self.session.released:
            return
        self.session.after_forward(output)

    def _begin_again(self) -> None:
        """With the parameters that the module has now. Collective: a model changes on all ranks alike."""
        before = self.session
        before.flush()  # what follows may not mix with blocks
        refusal, parameters = None, {}
        try:
            parameters = checks.trainable(self._module, known=self._frozen_since(before))
            checks.check_optimizers(self._optimizers, parameters)
        except Error as error:
            refusal = error
        # Until all ranks agree, the session stays: whoever goes on after an error meets it again.
        inner = checks.unwrapped(self._module)
        with before.traffic.watch.waiting("the agreement on the module's new parameters"):
            checks.check_same_call(self._group.shared, refusal, before.mode, self._options)
            checks.check_same_model(self._group, inner)
        before.release()
        try:
            # What is new may have been made from each rank's own random numbers.
            self._group.copy_from_first([*inner.parameters(), *inner.buffers()], "the module's parameters and buffers")
            self.session = Session(self._module, parameters, self._optimizers, self._group, self._options)
        except BaseException as error:
            self._failure = Error(
                f"gradcast could not begin again with the module's new parameters ({type(error).__name__}: {error}), "
                "and nothing synchronizes it now; call handle.detach(), or end the training",
                "invalid_use",
            )
            raise
        self.session.succeed(before)
        self._structure = Structure(self._module, self._optimizers, parameters.values())
        self._compiled.release()
        self._compiled = CompiledBlocks(self._module)
        if self._group.rank == 0:
            _log.info("the module's parameters have changed: measuring again, for %d steps", self._options.warmup_steps)

    def _frozen_since(self, before: Session) -> set[int]:
        """Parameters that were trained before and may be again: a loop that freezes parts by turns begins again once,
        not at each turn. Not where an optimizer has let go of them."""
        updated = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        return {id(p) for p in before.parameters if not self._optimizers or id(p) in updated}

    def _joining(self) -> None:
        if self.session.mode == "overlap":
            raise Error(
                "ranks may run out of inputs in ddp.join(), and the updates of those that go on would be missing on "
                "the others; leave join() out, or use hook mode: gradcast.attach(ddp) without the optimizer",
                "invalid_use",
            )
        if self._group.rank == 0:
            _log.warning("inside ddp.join() DDP reduces the gradients itself, without a plan")
        self.session.stand_aside(True)
        self._taken_over.reduce_again()

    def _joined(self) -> None:
        if self.session.aside:
            self._taken_over.take()
            self.session.stand_aside(False)
