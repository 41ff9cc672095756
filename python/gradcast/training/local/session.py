"""A session of local steps: hooks behind ``step()`` count steps, and rounds average the ranks' parameters.

No gradient is sent and no hook lies on one, so any loop that calls ``step()`` works: accumulation counts as one step,
and clipping is each rank's own. A GradScaler skips steps on single ranks, so that ranks would count differently; it is
refused.
"""

import contextlib
import datetime
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.host_traffic import Hosts
from gradcast.local_steps import make_schedule
from gradcast.training.acceptance import Accepted
from gradcast.training.compat import fork
from gradcast.training.local.facets import GlobalCopy, LocalCheckpoint, LocalReport
from gradcast.training.local.fragments import Fragments, entries
from gradcast.training.local.outer import OuterOptimizer
from gradcast.training.local.pacing import Pacing
from gradcast.training.local.rounds import FragmentExchange, Rounds
from gradcast.training.model_layout import ModelLayout
from gradcast.training.options import Nccl
from gradcast.training.plan.balancing import SamplerCall
from gradcast.training.ranks.group import DDP_MESSAGES, Group, nccl_settings
from gradcast.training.ranks.group_pool import lasting_group
from gradcast.training.ranks.nccl_settings import AS_THE_PROGRAM
from gradcast.training.sessions.hidden_ddp import HiddenDdp
from gradcast.training.sessions.kinds import Setup, TrainingSession
from gradcast.training.sessions.open_blocks import NoSyncBlocks, Progress
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.partial_step import is_called_by_scaler
from gradcast.training.step.update_callbacks import is_inner_step

_log = logging.getLogger("gradcast")
_MB = 1e6
_TIMEOUT_S = 1800.0  # torch's own, where the process group does not tell its


def inside_hosts(accepted: Accepted, group: Group, nccl: Nccl = AS_THE_PROGRAM) -> HiddenDdp:
    """Averages gradients over the ranks of this rank's host. Raises on all ranks alike."""
    hosts = group.hosts
    if hosts.count == 1 or hosts.ranks_per_host in (None, 1):
        raise refused(
            "options.local.inner is 'host', which needs two or more hosts, all with the same number of ranks, two or "
            f"more; this is {hosts.describe()}: omit it"
        )
    own = [rank for rank, host in enumerate(hosts.host_of) if host == hosts.host_of[group.rank]]
    everyone = dist.get_process_group_ranks(group.shared)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S if group.timeout_s is None else group.timeout_s)
    backend = dist.get_backend_config(group.shared)
    group.meet()
    settings = nccl_settings(group.shared, accepted.device, nccl)
    inside = lasting_group([everyone[rank] for rank in own], timeout, backend, "host", settings)
    Group(own.index(group.rank), len(own), group.shared, inside, device=accepted.device).connect(DDP_MESSAGES)
    group.meet()
    return HiddenDdp(accepted.called, inside, broadcast_buffers=True)


class LocalStepsSession(TrainingSession):
    """A session for any number of workers; a single one makes the outer updates from its own differences."""

    report: LocalReport

    def __init__(self, setup: Setup) -> None:
        accepted, group, options = setup.accepted, setup.group, setup.options
        local = options.local
        self.callbacks = setup.callbacks
        inside = inside_hosts(accepted, group, options.nccl) if local.inner == "host" else None
        wrappers = () if inside is None else inside.wrappers.values()
        super().__init__(group, "local", Progress(NoSyncBlocks(wrappers)))
        found = entries(accepted.parameters, accepted.module)
        sizes = [(each.flat().numel(), each.dtype.itemsize) for each in found]
        schedule = make_schedule(sizes, local.limit, local.overlap)
        outer = OuterOptimizer.of(local)
        fragments = Fragments(found, schedule, outer, options, group.world_size)
        self._network = None if group.world_size == 1 else FragmentExchange(fragments, group, options)
        pacing = Pacing(accepted, local, group) if local.every == "auto" else None
        self._rounds = Rounds(fragments, schedule, self._network, group, pacing, options)
        self._layout = ModelLayout(accepted.whole, setup.optimizers, accepted.parameters.values())
        self._warned_of_moved = False
        self.report = LocalReport(self._rounds, fragments, self._network, outer, options.wire)
        self.rounds = GlobalCopy(self.report, self.progress)
        self.checkpoint = LocalCheckpoint(self.report, self.rounds, group, self.progress)
        self._hooks: list[Any] = [each.register_step_pre_hook(self._before_step) for each in setup.optimizers]
        self._hooks.append(setup.optimizers[-1].register_step_post_hook(self._after_step))
        if inside is not None:
            self._hooks.append(inside)
        if self._network is not None:
            fork.watch(self)
        if group.rank == 0:
            _announce(local.limit, self._rounds, outer, fragments, None if inside is None else group.hosts)
            _warn_of_batch_norm(accepted.module)

    @property
    def exchange(self) -> GradientExchange:
        """For forks."""
        return self._network.exchange

    # --- Steps ---

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self.released or is_inner_step(optimizer):
            return
        if is_called_by_scaler():
            raise refused(
                "a GradScaler skips steps on the rank where gradients overflow, and with local steps the ranks would "
                "count differently; train without it, in bf16 (torch.autocast with dtype=torch.bfloat16 needs none)"
            )
        if self.rounds.lends:
            raise refused("step() inside handle.global_model(); train outside of it")
        self.progress.fence.refuse("step()")

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self.released or is_inner_step(optimizer):
            return
        if self._rounds.schedule.taken(self._rounds.clock + 1):
            self._look_for_changes()
        self._rounds.after_step()
        self.progress.steps = self._rounds.steps
        self.report.step_ended()

    def _look_for_changes(self) -> None:
        if self._layout.changed():
            raise refused(
                "the module's parameters or those of its optimizer have changed since attach, which local steps do not "
                "follow; call handle.end_round() and handle.detach() before the change, and attach again after it"
            )
        moved = self.report.fragments.moved_buffers()
        if moved and not self._warned_of_moved:
            self._warned_of_moved = True
            _log.warning(
                "rank %d: the buffer %s has another shape or memory format than at attach, so it is no longer "
                "averaged: each rank keeps its own; if it has to be averaged, give it its final form before attach",
                self.group.rank, moved[0],
            )  # fmt: skip

    # --- For the handle ---

    def flush(self, limit_s: float | None = None) -> None:
        """Sends nothing: waits for the fragments in flight."""
        if self._network is not None and not self.released and not self._rounds.has_failed:
            with self._network.exchange.waiting_at_most(limit_s):
                self._rounds.await_taken()

    def finish(self, limit_s: float | None = None) -> None:
        self.flush(limit_s)
        if self._rounds.has_failed:
            return
        everyone = [self.progress.steps]
        if self._network is not None and limit_s is None:
            what = f"handle.detach() on every rank (this one has made {self.progress.steps} steps)"
            with self._network.exchange.watch.waiting(what):
                everyone = self.group.gather(self.progress.steps, beside_blocks=True)
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
                "the training ends after %d steps, and options.local.every is %d: the ranks' models were never "
                "averaged; choose fewer steps, or call handle.end_round() on every rank", self.progress.steps, every,
            )  # fmt: skip
        elif clock % every or self._rounds.schedule.overlap:
            _log.warning(
                "the training ends inside a round, after %d steps: each rank keeps parameters of its own; call "
                "handle.end_round() on every rank before the model is used", self.progress.steps,
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
        if self._network is not None:
            self._close_exchange(self._network.exchange, (lambda: self._is_reusable) if reusable else None)
        self.released = True

    def abandon(self) -> None:
        self.released = True

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        raise refused(
            "handle.weight() weighs gradients, and local steps send none: the ranks' differences count alike; omit it, "
            "or train without options.local"
        )

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        raise refused("BalancedBatchSampler weighs gradients, and local steps send none; omit it, or options.local")

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        raise refused("local steps average the module's buffers once a round; call handle.end_round()")


def _announce(limit: int, rounds: Rounds, outer: OuterOptimizer, fragments: Fragments, hosts: Hosts | None) -> None:
    """``limit``: of steps in a round. ``hosts``: inside which gradients are averaged; None if they are not."""
    schedule, every = rounds.schedule, rounds.schedule.every
    how = (
        f"{len(schedule.fragments)} fragments, each applied {schedule.overlap} steps after it was taken, "
        f"{rounds.local_share:g} of it local"
        if schedule.overlap
        else "all at once, while training waits"
    )
    often = f"{every}" if limit == every else f"{every} (1 to {limit} as data allow)"
    kept = {name: size for name, size in fragments.state_bytes.items() if size}
    sizes = ", ".join(f"{name} {size / _MB:.1f} MB" for name, size in kept.items())
    _log.info(
        "local steps change the algorithm: gradients stay on their %s, and every %s steps the ranks average "
        "their parameters (%s; %s); beside the model each rank keeps %.1f MB (%s)",
        "rank" if hosts is None else "host", often, outer.describe(), how, sum(kept.values()) / _MB, sizes,
    )  # fmt: skip
    if hosts is not None:
        _log.info("inside each host gradients are averaged in every step, on %s", hosts.describe())


def _warn_of_batch_norm(module: nn.Module) -> None:
    norms = [name for name, each in module.named_modules() if isinstance(each, _BatchNorm)]
    if norms:
        _log.warning(
            "batch norm (%s) normalizes with each rank's own batch, and its running statistics are averaged only "
            "once a round; evaluate after handle.end_round()", norms[0],
        )  # fmt: skip
