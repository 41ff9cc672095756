"""The warm-up: the first steps, and the first steps after a change. Each waits for everything, and times are measured.

Meanwhile training does what DDP does, with buckets of several sizes. Every rank counts its own steps, so the warm-up
ends on all ranks after the same one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gradcast import _core
from gradcast.comparison.compare import link_of
from gradcast.comparison.measured_exchange import MeasuredExchange, with_exchange
from gradcast.host_traffic import exchange_form
from gradcast.training.measure import compute_cost, host_cost, network_cost
from gradcast.training.measure.step_trace import StepRecord
from gradcast.training.measure.stopwatch import Measurement, Stopwatch
from gradcast.training.measure.unseen_reads import ConsumerSearch, UnseenRead, agreed_reads
from gradcast.training.options import Options
from gradcast.training.plan import measured_profile
from gradcast.training.plan.agreement import AgreedPlan
from gradcast.training.plan.expectation import StepVariation
from gradcast.training.ranks.group import Group
from gradcast.training.step import pending
from gradcast.training.step.gradient_buffers import GradientSizes

_MIB = 1 << 20
# The first cap is DDP's own, so the warm-up costs little more than DDP. Smaller ones give the link model blocks of
# several sizes, measured while the cores are as busy as in training, which a probe between steps would miss
# (docs/guide/training.md).
_CAP_MAX_BYTES = 25 * _MIB
_CAP_MIN_BYTES = 16 * 1024
_CAP_DIVISORS = (1, 1, 4, 16, 2, 64)
# Every second step updates in so many calls of the optimizer, which shows what a call costs.
_PARTS = 4


class WarmupResult(NamedTuple):
    """``unseen_reads``: of parameters with unseen reads on some rank. ``variation``: of the measured steps.
    ``idle_saving_ns``: see network_cost.idle_saving_ns."""

    profile: _core.Profile
    unseen_reads: dict[int, UnseenRead]
    variation: StepVariation = StepVariation()
    idle_saving_ns: float = 0.0


class Warmup(pending.Owner):
    def __init__(
        self,
        sizes: GradientSizes,
        module: nn.Module,
        group: Group,
        mode: str,
        options: Options,
        *,
        order: Sequence[int],
    ) -> None:
        """``order``: of the parameters in the buffers. ``plans``: of the steps."""
        self._sizes, self._parameters = sizes, sizes.parameters
        self._group = group
        self._options = options
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._steps = 0
        self._blocks: list[list[network_cost.Sample]] = []
        self._host: list[host_cost.HostStep] = []
        self._profile = measured_profile.layout_profile(sizes, order, world_size=group.world_size, name="warm-up")
        plans = warmup_plans(self._profile, mode)
        self.plans = [plans[step % len(plans)] for step in range(options.plan.warmup_steps)]
        self.stopwatch = Stopwatch(self._parameters[0].device, len(self._parameters))
        self.watches_early = False  # reads between step() and forward are being watched
        self._search = ConsumerSearch(module, self._parameters, self.stopwatch.owner_started)

    def first_plan(self) -> AgreedPlan:
        return AgreedPlan(self._profile, self.plans[0])

    def watch_reads(self, on_read: Callable[[int], None], *, early: bool = False) -> None:
        """Measures when each parameter is first read in the forward pass that begins, and calls ``on_read`` with the
        number of parameters read. ``early``: between ``step()`` and forward."""
        if not early:
            self.stopwatch.watching()
            if self._options.unseen_reads == "by_module":
                self._search.forward_begins(self.stopwatch.unseen_reads())
        self._on_read, self.watches_early = on_read, early
        pending.mark(self._parameters, self)

    def read_by_compiled_model(self) -> None:
        """Called where forward of a model that is compiled as a whole begins: it waits for all parameters."""
        self.stopwatch.watching()
        for index in range(len(self._parameters)):
            self.stopwatch.read(index)

    def stop_watching(self) -> None:
        self.watches_early = False
        pending.clear(self._parameters)

    def forward_ended(self, output: Any) -> None:
        self.stopwatch.forward_ended()
        if self._search.forward_ended(pending.tensors_in(output)):
            self.stopwatch.resumed()

    def release(self) -> None:
        """Leaves the module. Nothing is measured any more."""
        self.stop_watching()
        self._search.release()

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        self._on_read(len(tensors))
        note = self.stopwatch.read_early if self.watches_early else self.stopwatch.read
        for tensor in tensors:
            note(self._index_of[id(tensor)])
        pending.clear(tensors)

    @property
    def update_parts(self) -> int:
        """The number of calls of the optimizer in the open step."""
        return _PARTS if self._steps and self._steps % 2 == 0 else 1

    def step_ended(self, iteration: _core.IterationRecord | None, ahead: StepRecord | None = None) -> AgreedPlan | None:
        """Counts a step in which everything was waited for. Returns what the next step follows, None after the last.
        ``ahead``: its record, if the host runs ahead of a device."""
        plan = self.plans[self._steps]
        # The first step is not counted: it makes connections and allocates memory.
        if iteration is not None and self._steps > 0:
            self._blocks.append(network_cost.samples_of_rank(plan, iteration.blocks))
            self._host += [] if ahead is None else [host_cost.host_step(ahead)]
        self._steps += 1
        if self._steps == self._options.plan.warmup_steps:
            return None
        return AgreedPlan(self._profile, self.plans[self._steps])

    def measured(self, flats: Sequence[torch.Tensor]) -> WarmupResult:
        """Returns the result of all ranks' measurements, the same on every rank. Collective.

        ``flats``: the gradient buffers. REQUIRES: nothing is in flight.
        """
        ranks = self._group.computed_by_each(lambda: self._measured(flats), "measuring the warm-up's steps")
        return self._group.computed_by_first(lambda: self._combined(ranks), "making a profile of what was measured")

    def _measured(self, flats: Sequence[torch.Tensor]) -> Measurement:
        pack_ns_per_byte = self.stopwatch.pack_ns_per_byte(flats)
        unseen = self.stopwatch.unseen_reads()
        if self._options.unseen_reads == "by_module":
            reads = self._search.results(unseen)
        else:
            reads = dict.fromkeys(sorted(unseen), UnseenRead("", "options.unseen_reads says so"))
        host = host_cost.host_times(self._host, host_cost.block_ns(self._parameters[0].device))
        return self.stopwatch.medians(self._blocks, pack_ns_per_byte, reads, host)

    def _combined(self, ranks: Sequence[Measurement]) -> WarmupResult:
        profile = measured_profile.combine_measurements(ranks, self._sizes)
        if self._group.shard is not None:
            profile = profile.replace(name=f"measured between the replicas of shard {self._group.shard}")
        unseen = agreed_reads([rank.unseen_reads for rank in ranks])
        if profile.link is None:
            return WarmupResult(profile, unseen)
        hosts, wire = self._group.hosts, self._options.wire
        form = exchange_form(hosts, wire, on_device=self._parameters[0].device.type != "cpu")
        profile = with_exchange(profile, MeasuredExchange(hosts, form, wire, self._group.backend))
        samples = measured_profile.block_samples(ranks)
        steps = compute_cost.steps_known_on_all_ranks([rank.compute for rank in ranks])
        variation = StepVariation(
            network_cost.cost_spread(samples, link_of(profile)),
            compute_cost.compute_variation(profile, steps),
        )
        return WarmupResult(profile, unseen, variation, network_cost.idle_saving_ns(samples) or 0.0)


def warmup_plans(profile: _core.Profile, mode: str) -> list[_core.Plan]:
    """DDP's buckets, from the last tensor to the first, in several sizes."""
    total = sum(tensor.bytes for tensor in profile.tensors)
    profile = measured_profile.with_message_joined(profile)
    link = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1, beta_ns_per_byte=1)])
    plans = []
    for divisor in _CAP_DIVISORS:
        cap = max(_CAP_MIN_BYTES, min(_CAP_MAX_BYTES, total // divisor))
        parameters = {"first_bytes": min(cap, _MIB) if divisor == 1 else cap, "cap_bytes": cap}
        plans.append(_core.make_plan(profile, link, policy="ddp", mode=mode, parameters=parameters))
    return plans
