"""The first steps, and the first after a change: plain plans, everything waited for, and stamps taken.

Until it is over, training is what DDP would do. It ends on all ranks after the same step, because every rank counts its
own steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.stopwatch import Stopwatch
from gradcast.training.options import Options
from gradcast.training.plan import agreement, measured_profile
from gradcast.training.plan.agreement import Agreed, Proposal
from gradcast.training.plan.expectation import StepVariation
from gradcast.training.ranks.group import Group
from gradcast.training.step import pending
from gradcast.training.step.gradient_buffers import Sizes


class Warmup:
    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        sizes: Sizes,
        group: Group,
        mode: str,
        options: Options,
        *,
        order: Sequence[int],
    ) -> None:
        """``order``: of the parameters in the buffers."""
        self._names = list(names)
        self._parameters = list(parameters)
        self._sizes = sizes
        self._group = group
        self._mode = mode
        self._options = options
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._steps = 0
        self._block_bytes: list[list[int]] = []
        self._blocks: list[list[network_cost.BlockDuration]] = []
        self._order = tuple(order)
        profile = measured_profile.layout_profile(
            names, sizes, self._order, world_size=group.world_size, name="warm-up"
        )
        plans = agreement.warmup_plans(profile, mode)
        self._plans = [plans[step % len(plans)] for step in range(options.warmup_steps)]
        self._profile = profile
        # Once there is a profile, on rank 0; see link_costs.saved_after_pause_ns.
        self.scatter = StepVariation()
        self.saved_after_pause_ns = 0.0
        self.unseen_reads: set[int] = set()  # on any rank, once there is a profile; see measure.Stopwatch
        self.stopwatch = Stopwatch(parameters[0].device, len(names))

    def first(self) -> Agreed:
        return agreement.agree(self._group, self._names, Proposal(self._profile.to_json(), self._plans[0].to_json()))

    def watch_reads(self, on_read: Callable[[], None]) -> None:
        """Before a forward pass: notes when each parameter is first read in it, and calls ``on_read`` then."""
        self._on_read = on_read
        self.stopwatch.watching()
        for parameter in self._parameters:
            if not pending.is_pending(parameter):
                pending.mark(parameter, self)

    def stop_watching(self) -> None:
        for parameter in self._parameters:
            pending.clear(parameter)

    def touched(self, tensors: list[torch.Tensor], function: Any) -> bool:
        self._on_read()
        for tensor in tensors:
            self.stopwatch.read(self._index_of[id(tensor)])
            pending.clear(tensor)
        return False

    def gradient_read(self, tensor: torch.Tensor) -> None:
        """Known, as long as steps are waited for."""

    def step_ended(self, iteration: _core.IterationRecord | None) -> Agreed | None:
        """After a step in which everything was waited for. Returns what the next one follows, None after the last."""
        plan = self._plans[self._steps]
        # The first step is not counted: connections are made and memory is allocated in it.
        if iteration is not None and self._steps > 0:
            self._block_bytes.append([block.size_bytes for block in plan.blocks])
            self._blocks.append([network_cost.took(block) for block in iteration.blocks])
        self._steps += 1
        if self._steps == self._options.warmup_steps:
            return None
        return Agreed(self._profile, self._plans[self._steps], self._order)

    def profile(self, flats: Sequence[torch.Tensor]) -> _core.Profile:
        """All ranks' measurements; the same on every rank. ``flats``: the buffers, at rest. Collective."""
        pack_ns_per_byte = self.stopwatch.pack_ns_per_byte(flats)
        ranks = self._group.gather(self.stopwatch.medians(self._block_bytes, self._blocks, pack_ns_per_byte))
        self.unseen_reads = measured_profile.unseen_reads(ranks)
        text: Any = None
        if self._group.rank == 0:
            try:
                profile = measured_profile.of_all_ranks(ranks, self._names, self._sizes, name="measured")
                if profile.link is not None:
                    samples = measured_profile.block_samples(ranks)
                    steps = compute_cost.measured_by_all([rank.compute for rank in ranks])
                    self.scatter = StepVariation(
                        network_cost.spread(samples, profile.link), compute_cost.scatter(profile, steps)
                    )
                    self.saved_after_pause_ns = network_cost.saved_after_pause_ns(samples) or 0.0
                text = profile.to_json()
            except Error as error:
                text = error
        text = self._group.from_first(text)
        if isinstance(text, Error):
            raise text
        return _core.Profile.from_json(text)
