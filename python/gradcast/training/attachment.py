"""An attachment to one or more modules, from ``attach`` to ``detach``: hooks around forward, and the current session.

A session is made for a set of parameters. When that set changes (a layer is thawed or added), a new session begins,
with a warm-up of its own. Around a DDP module DDP reduces by itself where no plan gains anything (handover.py).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import Error, refused
from gradcast.training import preflight
from gradcast.training.acceptance import check_optimizers, check_owners, trainable
from gradcast.training.called_clipping import loop_calls
from gradcast.training.compat import fork
from gradcast.training.compat.module_hooks import InputsHook, around_forward
from gradcast.training.model_layout import (
    ModelLayout,
    ShardedLayout,
    holds_other_tensors,
    in_functional_call,
)
from gradcast.training.plan.balancing import Balancing, SamplerCall, check_same_sampler
from gradcast.training.sessions.forward import is_evaluation
from gradcast.training.sessions.handover import Handover
from gradcast.training.sessions.kinds import Setup
from gradcast.training.sessions.open_blocks import Progress
from gradcast.training.sessions.session import Session
from gradcast.training.step.compiled_blocks import CompiledBlocks, is_compiled
from gradcast.training.step.partial_step import default_context
from gradcast.training.step.weights import GivenWeights

_RESTART = "beginning again with the module's new parameters"


class Attachment:
    """The attachment with two or more workers."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self.callbacks = setup, setup.callbacks
        self._given = GivenWeights(setup.options.weight)
        self._balancing: Balancing | None = None
        # Ids of parameters excluded from a session because they were frozen for long, and of those that came back.
        self._left_out: set[int] = set()
        self._thawed: set[int] = set()
        self._is_borrowed = False  # the open forward pass uses other tensors than the module's own
        self._is_called = False  # a forward pass of what the loop calls is open
        self._failure: Error | None = None  # of the start of a new session; nothing synchronizes the module since
        self._hooks: list[Any] = []
        self._handover: Handover | None = None
        self._begin(setup.accepted.parameters)
        self._compiled = self._compiled_blocks()
        try:
            self._install()
        except BaseException:
            self.release(leaves=False)  # nobody else could
            raise

    def _install(self) -> None:
        accepted = self._setup.accepted
        if accepted.ddp is not None:
            self._handover = Handover(self._setup, accepted.ddp, self._given, self.session)
        # FSDP gathers the root's parameters in such a hook.
        first = bool(accepted.shards)
        self._hooks += around_forward(accepted.called, self._before_forward, self._after_forward, first=first)
        if accepted.ddp is not None and not isinstance(accepted.module, torch.jit.ScriptModule):
            self._hooks += around_forward([accepted.module], self._before_inner, self._after_inner)
        if self._setup.options.weight == "samples":
            self._weigh_samples()
        if accepted.shards and self._setup.options.clips:
            own = weakref.proxy(self)
            self._hooks.append(loop_calls(lambda: own.session, self._setup.options.clip, self._setup.group))
        fork.watch(self)

    def _begin(self, parameters: dict[str, nn.Parameter], progress: Progress | None = None) -> None:
        if self._handover is not None:
            self._handover.end_session()
        self.callbacks.follow(parameters)
        self.session = Session(self._setup, parameters, self._given, progress)
        if self._balancing is not None:
            self.session.share_out(self._balancing)
        if self._handover is not None:
            self._handover.follow(self.session)
        whole, optimizers, shards = self._setup.accepted.whole, self._setup.optimizers, self._setup.accepted.shards
        self._layout: ModelLayout | ShardedLayout
        if shards:
            self._layout = ShardedLayout(shards, optimizers)
        else:
            self._layout = ModelLayout(whole, optimizers, parameters.values())

    def _compiled_blocks(self) -> CompiledBlocks:
        setup = self._setup
        split = setup.options.split_compiled and bool(setup.optimizers)  # in hook mode forward waits for nothing
        return CompiledBlocks(setup.accepted.whole, split, lambda: self.session.controller.warmup is not None)

    @property
    def _is_left_to_ddp(self) -> bool:
        return self._handover is not None and self._handover.by_ddp

    @property
    def released(self) -> bool:
        """True once gradcast has left the module, also in a forked child, which gradcast leaves alone."""
        return self.session.released and self._failure is None

    def release(self, *, leaves: bool = True, reusable: bool = False) -> None:
        """Gives module, optimizers and DDP back as they were. ``leaves``: the group, too. ``reusable``: nothing has
        failed, on any rank."""
        self._failure = None
        for hook in self._hooks:
            hook.remove()
        self._compiled.release()
        if not self.session.released:
            self.session.release(leaves=leaves, reusable=reusable)
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.release()
        if self._setup.replica is not None and leaves:
            self._setup.replica.leave(reusable=reusable)
        # A handle that the program keeps must not keep a DDP, or the next DDP around the module would be refused.
        del self._setup, self._layout, self._compiled

    @contextlib.contextmanager
    def weight(self, n: Any) -> Iterator[None]:
        self._refuse_parts("handle.weight()")
        given = self._given
        if not given.active:
            self.session.reduction.take_back()
            with self.session.exchange.watch.waiting("the first handle.weight() on every rank"):
                self._setup.group.gather(True, beside_blocks=True)
            given.active = True
        given.enter(n)
        try:
            yield
            if not given.used and not self.session.released:
                self._send_nothing()
        finally:
            given.leave()

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        group, what = self._setup.group, "gradcast.BalancedBatchSampler()"
        self._refuse_parts(what)
        self.session.reduction.take_back()
        waiting = self.session.exchange.watch.waiting(f"{what} on every rank")
        with waiting, group.together(what, beside_blocks=True):
            own = call()
            check_same_sampler(group.gather(own.settings, beside_blocks=True))
            self._given.active = True
            if self._setup.options.weight is None and self._balancing is None:
                self._weigh_samples()
            self._balancing = Balancing(own.schedule, group)
            self.session.share_out(self._balancing)
        if group.device.type != "cpu":
            group.warning("shares stay even: how long a rank computes on a %s is not measured", group.device.type)

    def _refuse_parts(self, what: str) -> None:
        if self._setup.accepted.stages:
            raise refused(f"{what} weighs one backward pass, and a pipeline runs several in each step; omit it")
        if self._setup.accepted.shards:
            raise refused(
                f"{what} gives ranks different weights, and of a module that FSDP shards the ranks of a replica count "
                "alike; omit it"
            )

    def _weigh_samples(self) -> None:
        count = InputsHook(self._count_samples)
        self._hooks += [each.register_forward_pre_hook(count, with_kwargs=True) for each in self._setup.accepted.called]

    def _send_nothing(self) -> None:
        """Takes part in a step whose backward pass, and perhaps forward pass, only other ranks run."""
        if self._given.contributes or not self.session.forward.is_synchronizing:
            raise refused(
                "no gradients were sent inside handle.weight(); put it around the backward pass of the step that "
                "is not in no_sync(), with all samples of the step; only a rank with 0 samples may omit backward"
            )
        with torch.enable_grad():
            self.callbacks.without_forward()
            for each in self._setup.accepted.called:
                self._before_forward(each, (), False)
            if self._handover is not None:
                self._handover.send_buffers()
            self.session.send_nothing()

    def _count_samples(self, module: nn.Module, inputs: Any, _: bool) -> None:
        if module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._given.count_samples(module, inputs)

    def _before_forward(self, called: nn.Module, _: Any, compiled: bool) -> None:
        if self._failure is not None:
            raise self._failure
        if self.session.released:  # in a forked child
            return
        self._is_called = True
        if torch.is_grad_enabled():
            self._refuse_other_ddp()
        frozen = set() if self._setup.accepted.shards else self.session.long_frozen - self._thawed
        with self.session.cycle.lock:
            changed = torch.is_grad_enabled() and (bool(frozen) or self._layout.changed())
        self._is_borrowed = in_functional_call() or (changed and holds_other_tensors(self._setup.accepted.module))
        if self._is_borrowed:
            self.session.forward.before_borrowed(called)
            return
        if self._handover is not None and self._handover.before_forward(changed=changed):
            return
        if changed:
            with default_context():
                self._restart(frozen)
        if not compiled:
            self._compiled.find()
        compiled = compiled or is_compiled(called) or is_compiled(self._setup.accepted.module)
        split = compiled and self._compiled.is_split(called)
        self.session.forward.before(called, compiled and not split)
        if split:
            self._compiled.resolve_first(called)

    def _before_inner(self, inner: nn.Module, __: Any, ___: bool) -> None:
        """Called before forward of the module inside a wrapper, which may be called alone."""
        if self.session.released or self._is_left_to_ddp:
            return
        if torch.jit.is_tracing():  # the trace must not contain our waiting
            self.session.forward.complete_step()
        elif is_evaluation(inner):
            self.session.forward.before_evaluation()

    def _after_inner(self, inner: nn.Module, output: Any, _: bool) -> None:
        if self.session.released or self._is_called:
            return
        if self._is_left_to_ddp:
            self._handover.after_inner()
        else:
            self.session.forward.after_inner(inner, output)

    def _after_forward(self, called: nn.Module, output: Any, _: bool) -> None:
        self._is_called = False
        if self.session.released or self._is_left_to_ddp:
            return
        if self._is_borrowed:
            self.session.forward.after_borrowed(called, output)
        else:
            self.session.forward.after(called, output)

    def _refuse_other_ddp(self) -> None:
        active = DistributedDataParallel._active_ddp_module
        if active is not None and active is not self._setup.accepted.ddp:
            raise refused(
                "this module runs inside a DistributedDataParallel that gradcast was not given, and both would average "
                "its gradients; call handle.detach(), and attach to that wrapper: gradcast.attach(ddp)"
            )

    def _restart(self, frozen: set[int]) -> None:
        """Begins a session with the parameters that the module has now, without those in ``frozen`` (ids). Collective:
        a model changes on all ranks alike, and all ranks learn in the same step that one is frozen for long."""
        if self._setup.accepted.shards:
            raise refused(
                "the parameters of the sharded module, or those of its optimizers, have changed since attach; call "
                "handle.detach(), and attach again"
            )
        before, group, inner = self.session, self._setup.group, self._setup.accepted.module
        # Until all ranks agree, the session stays: a program that goes on after an error meets that again.
        with before.exchange.watch.waiting("the agreement on the module's new parameters"):
            with group.together(_RESTART, beside_blocks=True):
                before.flush()  # the following collectives must not mix with blocks
                check_owners(self._setup.accepted.whole)
                parameters = trainable(inner, known=self._frozen_since(before) - frozen)
                check_optimizers(self._setup.optimizers, parameters)
                preflight.check_tensor_parallel(self._setup.options, self._setup.accepted.whole, group)
                preflight.check_same_restart(group, before.mode, self._setup.options)
            preflight.check_same_model(group, inner)
        try:
            with group.together(_RESTART):
                before.release(leaves=False)
                # New parameters may have been made from each rank's own random numbers.
                preflight.copy_model_from_first(group, inner, self._setup.options)
                self._begin(parameters, before.progress)
        except BaseException as error:
            self._failure = refused(
                f"gradcast could not begin again with the module's new parameters ({type(error).__name__}: {error}), "
                "and nothing synchronizes the module now; call handle.detach(), or end the training"
            )
            if not self.session.released:
                with contextlib.suppress(Exception):
                    self.session.release(leaves=False)
            raise
        self._left_out |= frozen
        self._thawed |= self._left_out & set(map(id, parameters.values()))
        self._compiled.release()
        self._compiled = self._compiled_blocks()
        why = (
            f"{len(frozen)} parameters have been frozen for long, and are no longer sent"
            if frozen
            else "the module's parameters have changed"
        )
        self._setup.group.info("%s: measuring again, for %d steps", why, self._setup.options.plan.warmup_steps)

    def _frozen_since(self, before: Session) -> set[int]:
        """Ids of parameters that were trained before and may be again, unless an optimizer has dropped them. A loop
        that freezes parts in turn therefore restarts once, not at each turn."""
        updated = {id(p) for each in self._setup.optimizers for group in each.param_groups for p in group["params"]}
        return {id(p) for p in before.parameters if not self._setup.optimizers or id(p) in updated}
