"""The handle that ``attach`` returns."""

import contextlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from gradcast import _core
from gradcast.errors import Error
from gradcast.files import write_text
from gradcast.training.attached_modules import attached_modules, close_at_exit, detach
from gradcast.training.diagnostics import Diagnostics
from gradcast.training.step.gradient_buffers import GradientRange
from gradcast.training.training_session import Attached, TrainingSession, require_attached


class Handle:
    """Returned by ``attach``. The program need not keep it: training goes on without it."""

    def __init__(self, module: nn.Module, attached: Attached) -> None:
        """``module``: without DDP's wrapper."""
        self._attached = attached
        self._module = weakref.ref(module)
        close_at_exit(attached)

    @property
    def _session(self) -> TrainingSession:
        return self._attached.session

    @property
    def mode(self) -> str:
        """ "hook" or "overlap"; "ddp" if GRADCAST_DISABLE is set, so that stock DDP trains."""
        return self._session.mode

    @property
    def rank(self) -> int:
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        return self._session.group.world_size

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; during the warm-up a DDP baseline. None with a single worker."""
        return self._session.plan

    @property
    def plan_version(self) -> int:
        """Grows with each plan, those of the warm-up included."""
        return self._session.plan_version

    @property
    def profile(self) -> _core.Profile | None:
        """The profile that the warm-up has measured, the same on every rank; None before."""
        return self._session.profile

    @property
    def measuring(self) -> bool:
        """Whether a warm-up is running, the first one or one after a change."""
        return self._session.measuring

    @property
    def layout(self) -> tuple[GradientRange, ...]:
        """The place of each gradient in the buffers, in the order of the plan's profile."""
        return self._session.layout

    def flush(self) -> None:
        """Waits until every gradient in flight has arrived, and runs every update that is due (on a device: puts it on
        the current stream).

        Needed only before parameters are read in ways that PyTorch does not show: raw pointers, to_dlpack(),
        TorchScript.
        """
        if not self._session.released:
            self._session.flush()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside stay on this worker and add up, as with DDP's no_sync()."""
        require_attached(self._session)
        blocks = self._session.no_sync_blocks
        blocks.enter()
        try:
            yield
        finally:
            blocks.leave()

    def stats(self) -> dict[str, Any]:
        """Statistics of the last steps; times in ms, sizes in bytes, None for what is not known yet."""
        return self._session.stats()

    def timeline(self) -> dict[str, Any]:
        """The last steps of this rank as a Chrome trace; ui.perfetto.dev opens it."""
        return {
            "traceEvents": self._session.timeline_events(),
            "distributedInfo": {"rank": self.rank, "world_size": self.world_size},
        }

    def save_timeline(self, path: str) -> None:
        write_text(path, json.dumps(self.timeline()), "timeline")

    def save_profile(self, path: str) -> None:
        """Saves the measured profile for ``gradcast simulate`` and ``gradcast dev plan``."""
        if self.profile is None:
            raise Error("the profile is not measured yet; save it after the warm-up steps", "invalid_use")
        write_text(path, self.profile.to_json(), "profile")

    def save_plan(self, path: str, profile_path: str | None = None) -> None:
        """Saves the plan in force; ``Options(plan=path)`` follows it again. ``profile_path``: noted in the file for
        ``gradcast dev plot``."""
        write_text(path, self._session.plan_text(profile_path), "plan")

    def state_dict(self) -> dict[str, Any]:
        """Plan and profile for a checkpoint: a dict of strings and numbers."""
        require_attached(self._session)
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follows the plan of a checkpoint instead of measuring, if model, mode and number of workers are the same;
        otherwise the warm-up goes on. Rank 0's state counts. Collective; not between backward and step()."""
        require_attached(self._session)
        self._session.load_state_dict(state)

    def detach(self, *, wait_s: float | None = None) -> None:
        """Completes what is in flight and gives back module and optimizers as they were. Collective. Idempotent.

        ``wait_s``: for use after an error, when other ranks may never answer. Raises Error(communication) if it takes
        longer; the module is given back all the same, and its parameters may lack an update.
        """
        try:
            if not self._attached.released:
                detach(self._attached, wait_s)
        finally:
            module = self._module()
            if module is not None:
                attached_modules.pop(module, None)

    def _diagnostics(self) -> Diagnostics:
        """For gradcast's own tools; no stable interface. See diagnostics.py."""
        return self._session.diagnostics()
