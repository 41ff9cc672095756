"""A session of local steps: hooks behind ``step()`` count steps, and rounds average the ranks' parameters.

No gradient is sent and none has a hook, so any loop that calls ``step()`` works: accumulation counts as one step,
and clipping is each rank's own. A GradScaler skips steps on single ranks, so that ranks would count differently; it is
refused.
"""

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.local_steps import make_schedule
from gradcast.training.acceptance import Accepted
from gradcast.training.compat import fork
from gradcast.training.local.fragments import Fragments, entries
from gradcast.training.local.outer import OuterOptimizer
from gradcast.training.local.pacing import Pacing
from gradcast.training.local.rounds import FragmentExchange, Rounds
from gradcast.training.model_layout import ModelLayout
from gradcast.training.plan.balancing import SamplerCall
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.group_pool import lasting_group
from gradcast.training.sessions.hidden_ddp import HiddenDdp
from gradcast.training.sessions.kinds import Setup, TrainingSession, require_attached
from gradcast.training.step import residuals
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.partial_step import is_called_by_scaler
from gradcast.training.step.update_callbacks import is_inner_step

_log = logging.getLogger("gradcast")
STATE_VERSION = 1
_MB = 1e6
_TIMEOUT_S = 1800.0  # torch's own, where the process group has none


def inside_hosts(accepted: Accepted, group: Group, max_ctas: int | None = None) -> HiddenDdp:
    """Averages gradients over the ranks of this rank's host. Raises on all ranks alike."""
    hosts = group.hosts
    if hosts.count == 1 or hosts.ranks_per_host in (None, 1):
        raise refused(
            f"options.inner is 'host', which needs two or more hosts, all with the same number of ranks, two or more; "
            f"this is {hosts.describe()}: leave it out"
        )
    own = [rank for rank, host in enumerate(hosts.host_of) if host == hosts.host_of[group.rank]]
    everyone = dist.get_process_group_ranks(group.shared)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S if group.timeout_s is None else group.timeout_s)
    backend = dist.get_backend_config(group.shared)
    group.meet()
    inside = lasting_group([everyone[rank] for rank in own], timeout, backend, "host", max_ctas)
    Group(own.index(group.rank), len(own), group.shared, inside, device=accepted.device).connect()
    group.meet()
    return HiddenDdp(accepted.called, inside, broadcast_buffers=True)


class LocalStepsSession(TrainingSession):
    """For any number of workers; a single one makes the outer updates from its own differences."""

    mode = "local"

    def __init__(self, setup: Setup) -> None:
        accepted, group, options = setup.accepted, setup.group, setup.options
        self.callbacks, self._options = setup.callbacks, options
        self._inside = inside_hosts(accepted, group, options.max_ctas) if options.inner == "host" else None
        super().__init__(group, () if self._inside is None else self._inside.wrappers.values())
        self._module = accepted.module
        found = entries(accepted.parameters, accepted.module)
        sizes = [(each.flat().numel(), each.dtype.itemsize) for each in found]
        schedule = make_schedule(sizes, options.sync_every_limit, options.outer_overlap)
        self._outer = OuterOptimizer.of(options)
        self._fragments = Fragments(found, schedule, self._outer, options, group.world_size)
        self._network = None if group.world_size == 1 else FragmentExchange(self._fragments, group, options)
        pacing = Pacing(accepted, options, group) if options.sync_every == "auto" else None
        self._rounds = Rounds(self._fragments, schedule, self._network, group, pacing, options)
        self._layout = ModelLayout(accepted.whole, setup.optimizers, accepted.parameters.values())
        self._warned_of_moved = False
        self._step_ends: list[tuple[int, int]] = []  # of this round and the last: time, and what was waited until then
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in setup.optimizers]
        self._hooks.append(setup.optimizers[-1].register_step_post_hook(self._after_step))
        if self._network is not None:
            fork.watch(self)
        if group.rank == 0:
            self._tell()

    def _tell(self) -> None:
        schedule = self._rounds.schedule
        how = (
            f"{len(schedule.fragments)} fragments, each applied {schedule.overlap} steps after it was taken, "
            f"{self._rounds.local_share:g} of it local"
            if schedule.overlap
            else "all at once, while training waits"
        )
        limit = self._options.sync_every_limit
        often = f"{schedule.every}" if limit == schedule.every else f"{schedule.every} (1 to {limit} as data allow)"
        kept = {name: size for name, size in self._fragments.state_bytes.items() if size}
        sizes = ", ".join(f"{name} {size / _MB:.1f} MB" for name, size in kept.items())
        _log.info(
            "local steps change the algorithm: gradients stay on their %s, and every %s steps the ranks average "
            "their parameters (%s; %s); beside the model each rank keeps %.1f MB (%s)",
            "rank" if self._inside is None else "host", often, self._outer.describe(), how,
            sum(kept.values()) / _MB, sizes,
        )  # fmt: skip
        if self._inside is not None:
            _log.info("inside each host gradients are averaged in every step, on %s", self.group.hosts.describe())
        norms = [name for name, each in self._module.named_modules() if isinstance(each, _BatchNorm)]
        if norms:
            _log.warning(
                "batch norm (%s) normalizes with each rank's own batch, and its running statistics are averaged only "
                "once a round; evaluate after handle.end_round()", norms[0],
            )  # fmt: skip

    @property
    def exchange(self) -> GradientExchange:
        """For forks."""
        return self._network.exchange

    @property
    def plan(self) -> _core.Plan | None:  # type: ignore[override]
        return None if self._network is None else self._network.plan

    # --- Steps ---

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self.released or is_inner_step(optimizer):
            return
        if is_called_by_scaler():
            raise refused(
                "a GradScaler skips steps on the rank where gradients overflow, and with local steps the ranks would "
                "count differently; train without it, in bf16 (torch.autocast with dtype=torch.bfloat16 needs none)"
            )
        if self.lends:
            raise refused("step() inside handle.global_model(); train outside of it")
        self.fence.refuse("step()")

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self.released or is_inner_step(optimizer):
            return
        if self._rounds.schedule.taken(self._rounds.clock + 1):
            self._look_for_changes()
        self._rounds.after_step()
        self.steps = self._rounds.steps
        self._step_ends.append((time.perf_counter_ns(), self._rounds.waited_ns))
        del self._step_ends[: -self._rounds.schedule.every - 1]

    def _look_for_changes(self) -> None:
        if self._layout.changed():
            raise refused(
                "the module's parameters or those of its optimizer have changed since attach, which local steps do not "
                "follow; call handle.end_round() and handle.detach() before the change, and attach again after it"
            )
        moved = self._fragments.moved_buffers()
        if moved and not self._warned_of_moved:
            self._warned_of_moved = True
            _log.warning(
                "rank %d: the buffer %s has another shape or memory format than at attach, so it is no longer "
                "averaged: each rank keeps its own; if it has to be averaged, give it its final form before attach",
                self.group.rank, moved[0],
            )  # fmt: skip

    # --- For the handle ---

    def end_round(self) -> None:
        require_attached(self)
        self._require_own()
        self.fence.refuse("handle.end_round()")
        self._rounds.end()
        self._step_ends.clear()

    @contextlib.contextmanager
    def global_model(self) -> Iterator[None]:
        require_attached(self)
        self._require_own()
        own = self._fragments.by_name("local")
        self.lends = True
        self._fragments.restore("local", self._fragments.by_name("values"))
        try:
            yield
        finally:
            self.lends = False
            self._fragments.restore("local", own)

    def _require_own(self) -> None:
        if self.lends:
            raise refused("inside handle.global_model() the module has the global copy; leave it first")

    def flush(self, limit_s: float | None = None) -> None:
        """Sends nothing: waits for the fragments in flight."""
        if self._network is not None and not self.released and not self._rounds.has_failed:
            with self._network.exchange.waiting_at_most(limit_s):
                self._rounds.await_taken()

    def finish(self, limit_s: float | None = None) -> None:
        self.flush(limit_s)
        if self._rounds.has_failed:
            return
        everyone = [self.steps]
        if self._network is not None and limit_s is None:
            what = f"handle.detach() on every rank (this one has made {self.steps} steps)"
            with self._network.exchange.watch.waiting(what):
                everyone = self.group.gather(self.steps, beside_blocks=True)
        self._warn_of_open_round()
        if min(everyone) != max(everyone):
            raise refused(
                f"the ranks' loops differ: at handle.detach() they have made {min(everyone)} to {max(everyone)} steps; "
                "give all ranks the same number of optimizer steps"
            )

    def _warn_of_open_round(self) -> None:
        clock, every = self._rounds.clock, self._rounds.schedule.every
        if self.group.rank != 0 or self.group.world_size == 1 or clock == 0:
            return
        if self._rounds.count == 0:
            _log.error(
                "the training ends after %d steps, and options.sync_every is %d: the ranks' models were never "
                "averaged; choose fewer steps, or call handle.end_round() on every rank", self.steps, every,
            )  # fmt: skip
        elif clock % every or self._rounds.schedule.overlap:
            _log.warning(
                "the training ends inside a round, after %d steps: each rank keeps parameters of its own; call "
                "handle.end_round() on every rank before the model is used", self.steps,
            )  # fmt: skip

    def close_at_exit(self, *, failed: bool) -> None:
        if not self.released and self._network is not None:
            self._close_exchange(self._network.exchange, None if failed else self._finish_at_exit)

    def _finish_at_exit(self) -> bool:
        self.flush()
        self._warn_of_open_round()
        return self._is_reusable

    @property
    def _is_reusable(self) -> bool:
        return not self._rounds.has_failed and not self._rounds.has_open_iteration

    def release(self, *, reusable: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._inside is not None:
            self._inside.remove()
        if self._network is not None:
            self._close_exchange(self._network.exchange, (lambda: self._is_reusable) if reusable else None)
        self.released = True

    def abandon(self) -> None:
        self.released = True

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        raise refused(
            "handle.weight() weighs gradients, and local steps send none: the ranks' differences count alike; leave it "
            "out, or train without options.sync_every"
        )

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        raise refused("BalancedBatchSampler weighs gradients, and local steps send none; leave it out, or sync_every")

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        raise refused("local steps average the module's buffers once a round; call handle.end_round()")

    def plan_text(self, profile_path: str | None) -> str:
        raise refused("local steps follow no measured plan; their schedule follows from the model and the options")

    def stats(self) -> dict[str, Any]:
        schedule, ends = self._rounds.schedule, self._step_ends
        count = max(1, len(ends) - 1)
        own = {
            "sync_every": schedule.every,
            "pace": None if self._rounds.pacing is None else self._rounds.pacing.last,
            "outer": "average" if self._outer.momentum is None else "nesterov",
            "outer_overlap": schedule.overlap,
            "outer_merge": self._rounds.local_share if schedule.overlap else 0.0,
            "fragments": len(schedule.fragments),
            "in_flight": self._rounds.in_flight,
            "rounds": self._rounds.count,
            "steps_in_round": self._rounds.clock % schedule.every,
            "bytes_per_round": self._fragments.sent_bytes if self._network is not None else 0,
            "state_bytes": sum(self._fragments.state_bytes.values()),
        }
        values = super().stats() | {"local_steps": own, "wire": self._options.wire}
        if len(ends) > 1:
            values["measured_ms"] = (ends[-1][0] - ends[0][0]) / count / 1e6
            values["exposed_ms"] = (ends[-1][1] - ends[0][1]) / count / 1e6
        if self._network is not None:
            values["bytes"] = sum(block.size_bytes for block in self._network.plan.blocks)
            values["wire_bytes"] = self._network.exchange.wire_bytes(self._network.plan)
            values["blocks"] = len(self._network.plan.blocks)
        return values

    # --- Checkpoints ---

    def state_dict(self, kept: dict[str, Any] | None = None) -> dict[str, Any]:
        """This rank's state. Sends nothing, and waits for the fragments in flight. ``kept``: for a snapshot, the
        memory of its tensors, which this fills, but for what the module's state dict has."""
        self._require_own()
        state = self._rounds.state(kept)
        own = {"version": STATE_VERSION, "mode": self.mode, "rank": self.group.rank}
        left = {} if self._fragments.buffers is None else residuals.saved(self._fragments.buffers, self.group)
        return own | state | left

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_attached(self)
        self._require_own()
        what = "handle.load_state_dict()"
        network = self._network
        with contextlib.nullcontext() if network is None else network.exchange.watch.waiting(f"{what} on every rank"):
            everyone = self.group.computed_by_each(lambda: self._restored(state), what)
        if any(fingerprint != everyone[0] for fingerprint in everyone):
            raise refused(
                "the ranks have loaded states of different steps; let each load the state that it has saved after the "
                "same step"
            )
        self.steps = self._rounds.steps

    def _restored(self, state: dict[str, Any]) -> tuple[int, ...]:
        """Loads the state. Returns values that have to be equal on all ranks."""
        try:
            self.check(state)
            self._rounds.restore(state)
            if self._fragments.buffers is not None:
                self._restore_residuals(state)
        except (KeyError, TypeError) as error:
            raise refused(
                f"the state is not whole ({type(error).__name__}: {error}); load what handle.state_dict() returned"
            ) from None
        return self._rounds.fingerprint()

    def _restore_residuals(self, state: dict[str, Any]) -> None:
        try:
            dropped = residuals.restore(self._fragments.buffers, self.group, state)
        except Error as error:
            if state["place"]["clock"] > 0:
                raise
            dropped = str(error)  # between rounds other settings, which cut other fragments, are fine
        if dropped is not None:
            _log.warning(
                "what rounding has left of earlier differences is dropped on rank %d: %s", self.group.rank, dropped
            )

    def check(self, state: dict[str, Any]) -> None:
        """Raises Error(invalid_use) for a state that this rank cannot load."""
        if state.get("mode") != self.mode or state.get("version") != STATE_VERSION:
            raise refused("the state is not one of local steps of this version; load what handle.state_dict() returned")
        if self._rounds.steps > 0:
            raise refused("load the state right after attach, before the first step")
        reason = self._rounds.refusal_of(state)
        if reason is None and state["place"]["clock"] > 0 and state["rank"] != self.group.rank:
            reason = f"it is that of rank {state['rank']}, and this is rank {self.group.rank}"
        if reason is not None:
            raise refused(f"training cannot go on from this state: {reason}")
