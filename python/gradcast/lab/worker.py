"""One rank of ``gradcast dev lab train``.

Trains one model per variant. The variants take turns, so that other load of the machine affects all of them equally.
Rank 0 prints the progress.
"""

import json
import statistics
from typing import Any

import torch
import torch.distributed as dist

import gradcast
from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.lab import predictions, replays
from gradcast.lab.cores import BusyCores, sent_bytes
from gradcast.lab.models import make_task
from gradcast.lab.replays import Step
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Trainer
from gradcast.lab.variants import (
    BASELINE,
    COMPUTE,
    DDP_MGWFBP,
    DDP_NEAR,
    Variant,
    scaled,
    variant,
)
from gradcast.training.observe import CALIBRATION_STEPS

# Steps after gradcast's warm-up: it compares the plan with its first steps and may make a new one, whose first steps
# use new buffers. DDP rebuilds its buckets after one step.
_SETTLING_STEPS = CALIBRATION_STEPS + 4
_MEASURING = Variant("overlap (to measure)", "overlap")


def measure(settings: Settings) -> dict[str, Any]:
    return Measurement(settings).run()


class Measurement:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task = make_task(settings, dist.get_rank())
        self._prepared_steps = gradcast.Options().plan.warmup_steps + _SETTLING_STEPS
        # By name of a gradcast variant: the version of its plan, and the steps that followed it, by step and rank.
        self._steps: dict[str, tuple[int, list[tuple[Step, ...]]]] = {}

    def run(self) -> dict[str, Any]:
        settings = self._settings
        known = [variant(name) for name in settings.names if name not in (DDP_NEAR, DDP_MGWFBP)]
        by_gradcast = [self._prepared(each) for each in known if each.by_gradcast]
        profile = self._measured(by_gradcast)
        as_ddp_sends = ddp_baseline.as_ddp_sends(profile, _parameter_bytes(self._task.module()))
        found = [each for name in settings.names for each in _resolved(name, as_ddp_sends, settings.scale_size)]
        others = [self._prepared(each) for each in dict.fromkeys(found) if not each.by_gradcast]
        trainers = sorted([*by_gradcast, *others], key=lambda trainer: found.index(trainer.variant))
        rounds = [self._round(trainers, number) for number in range(settings.rounds)]
        results = {
            "torch": torch.__version__,
            "parameter_bytes": sum(_parameter_bytes(trainers[0].module).values()),
            "profile": json.loads(profile.to_json()),
            "rounds": rounds,
            "differences": differences(trainers, self._task.module()),
            "variants": {trainer.variant.name: self._facts(trainer, as_ddp_sends) for trainer in trainers},
        }
        for trainer in trainers:
            trainer.detach()
        return results

    def _prepared(self, each: Variant) -> Trainer:
        trainer = Trainer(each, self._task, in_flight=self._settings.in_flight)
        last_ms = trainer.turn(self._prepared_steps)[-1]
        tell(f"prepared {each.name}: {self._prepared_steps} steps, the last of {last_ms:.0f} ms")
        return trainer

    def _measured(self, by_gradcast: list[Trainer]) -> _core.Profile:
        """Returns gradcast's profile in fp32, the same on every rank: overlap mode's, if there is one."""
        exact = [trainer for trainer in by_gradcast if trainer.variant.wire == "fp32"]
        chosen = sorted(exact, key=lambda trainer: trainer.variant.mode != "overlap")[:1]
        for trainer in chosen or [self._prepared(_MEASURING)]:
            profile = trainer.handle.profile
            if not chosen:
                trainer.detach()
        return profile

    def _round(self, trainers: list[Trainer], number: int) -> dict[str, Any]:
        """Trains each variant on the same batches. The first step does not count: it finds another's caches."""
        tell(f"round {number + 1} of {self._settings.rounds}, ms per step:", end="")
        steps_ms, busy, sent = {}, {}, {}
        for trainer in trainers:
            name = trainer.variant.name
            batches = self._task.batches(trainer.step_count, self._settings.steps)
            dist.barrier()
            before = sent_bytes()
            times = trainer.steps(batches)
            next(times)
            cores = BusyCores()
            steps_ms[name] = list(times)
            busy[name] = cores.share()
            self._keep_steps(trainer)
            trainer.finish()
            sent[name] = self._sent_per_step(before)
            tell(f"  {name} {statistics.median(steps_ms[name]):.0f}", end="")
        tell("")
        return {"steps_ms": steps_ms, "cores_busy": busy, "sent_bytes": sent}

    def _sent_per_step(self, before: int) -> list[float]:
        """Returns the bytes that have left each host since its counter's ``before``, per step of a turn. Collective."""
        dist.barrier()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (sent_bytes() - before) / self._settings.steps)
        return ranks[:: self._settings.ranks_per_host]

    def _keep_steps(self, trainer: Trainer) -> None:
        """Keeps the round's steps for the replay, without the first and the last, which has not ended. Collective."""
        if trainer.handle is None:
            return
        own = replays.last_steps(trainer.handle, self._settings.steps - 2)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        name, version = trainer.variant.name, trainer.handle.plan_version
        before, kept = self._steps.get(name, (version, []))
        self._steps[name] = version, [*(kept if before == version else []), *zip(*ranks, strict=True)]

    def _facts(self, trainer: Trainer, as_ddp_sends: _core.Profile) -> dict[str, Any]:
        """Returns the number of operations of a step and its predicted time, None if nothing is sent."""
        if trainer.variant.mode == "ddp":
            plan = predictions.ddp_plan(as_ddp_sends, trainer.variant)
            return {
                "blocks": trainer.bucket_count(),
                "planned_blocks": len(plan.blocks),
                "predicted_ms": plan.predicted_ns / 1e6,
                "caps_mib": trainer.variant.caps_mib,
            }
        if trainer.handle is None:
            return {"blocks": None, "predicted_ms": None}
        stats = trainer.handle.stats()
        facts = {key: stats[key] for key in ("blocks", "predicted_ms", "policy", "plan_version")} | {"stats": stats}
        replay = None
        if stats["predicted_ms"] is not None and trainer.handle.profile.link is not None:
            replay = replays.replay(trainer.handle.profile, trainer.handle.plan, self._steps[trainer.variant.name][1])
        return facts | ({} if replay is None else {"replay": replay._asdict()})


def _resolved(name: str, profile: _core.Profile, factor: float) -> list[Variant]:
    if name == DDP_NEAR:
        return [scaled(variant(f"ddp:{cap}"), factor) for cap in predictions.near_best_caps_mib(profile, factor)]
    if name == DDP_MGWFBP:
        return [Variant(name, "ddp", caps_mib=tuple(predictions.mgwfbp_caps_mib(profile)))]
    return [scaled(variant(name), factor)]


def differences(trainers: list[Trainer], start: torch.nn.Module) -> dict[str, float]:
    """Returns the largest difference of a parameter to DDP's on any rank, relative to that tensor's largest value.

    ``start``: the model before training. A tensor of two elements may come close to zero, where rounding is large
    relative to its values, but not relative to its initial ones.
    """
    reference = next(trainer for trainer in trainers if trainer.variant.name == BASELINE)
    compared = [trainer for trainer in trainers if trainer.variant.name not in (BASELINE, COMPUTE)]
    if not compared:
        return {}
    models = [[each.detach() for each in model.parameters()] for model in (reference.module, start)]
    found = [
        # torch's maximum is NaN if any value is.
        torch.stack(
            [relative_difference(*same) for same in zip(trainer.module.parameters(), *models, strict=True)]
        ).max()
        for trainer in compared
    ]
    largest = torch.stack(found).detach().double()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {trainer.variant.name: float(value) for trainer, value in zip(compared, largest, strict=True)}


def relative_difference(one: torch.Tensor, reference: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    largest = torch.maximum(reference.abs().max(), start.abs().max())
    return (one - reference).abs().max() / largest.clamp_min(torch.finfo(reference.dtype).tiny)


def _parameter_bytes(module: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.numel() * parameter.element_size() for name, parameter in module.named_parameters()}


def tell(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)
