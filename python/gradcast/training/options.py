"""The settings of ``attach``, checked when they are made."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.errors import Error
from gradcast.host_traffic import WIRE_SHARES
from gradcast.local_pace import LIMIT, METRICS

# This module alone reads the variable.
PLAN_VARIABLE = "GRADCAST_PLAN"


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of ``attach``; the defaults need no change.

    * ``warmup_steps``: steps that are measured before the first plan, at least 3. The first one does not count, because
      memory is allocated in it.
    * ``plan``: a file with a plan to follow instead of one made from the measurements. The environment variable
      GRADCAST_PLAN does the same.
    * ``policy``, ``policy_parameters``, ``in_flight``: as for ``gradcast dev plan``, except that the default policy has
      a block_tolerance of 0.005 here: of the plans whose predicted step is at most 0.5 % longer than the best one, it
      takes the one with the fewest blocks. A measured start-up cost may be far too low, even 0, and a plan of many
      blocks pays the true one for each.
    * ``adapt``: gradcast measures and plans again when the network or compute has changed, tries the DDP baseline from
      time to time, and keeps to it if it is as fast. Off: the first plan is followed in any case.
    * ``wire``: "bf16" or "fp16" sends fp32 gradients as 16-bit numbers: half the bytes, with loss. Each rank's numbers
      are rounded once, and their sum, made in fp32, once more. "int8": 8-bit numbers with one scale for each 128, a
      quarter of the bytes; every rank adds what rounding has taken to its next gradient (error feedback). Gradients of
      one dimension travel unchanged. For tensors on the CPU. "fp32": all gradients travel unchanged. ``attach`` warns
      where a format sends no fewer bytes than fp32; in host memory on one host it uses fp32.
    * ``max_grad_norm``, ``grad_norm_type``: in overlap mode every step clips the gradients, as
      ``clip_grad_norm_(module.parameters(), max_grad_norm, grad_norm_type)`` before ``step()`` would. As long as the
      ranks' norms prove that nothing is to be clipped, the step overlaps with forward as without clipping; otherwise it
      waits for all gradients. Norm types other than 1, 2 and inf always wait. Gradients that are not averaged (a step
      whose passes are all under ``no_sync()``) are not clipped.
    * ``max_grad_value``: likewise as ``clip_grad_value_(module.parameters(), max_grad_value)``; it never waits.
    * ``weight``: "samples": the mean over the ranks is weighted with the samples of each rank's step: the length of the
      first tensor that forward is given, summed over the step's forward passes. ``handle.weight(n)`` overrules it.
      None: all ranks count alike, as with DDP, unless the program calls ``handle.weight(n)``.
    * ``broadcast_buffers``: a bare module gets rank 0's buffers, as with DDP's argument of this name.
    * ``unseen_reads``: where forward waits for parameters that it reads unseen, as C++ extensions do. "by_module": at
      the module that owns them, if autograd's graph shows that it alone uses them. "before_forward": before forward
      begins, for models that also read them earlier, where autograd does not record it.
    * ``split_compiled``: a model that is compiled as a whole is split before its larger parts, each of which becomes a
      graph, so that communication overlaps with backward and forward. Where a compiler's roundings depend on what lies
      in one graph, they are those of the split model. Off: its forward waits for all parameters.
    * ``sync_every``: changes the algorithm: gradients stay on their rank, and every so many optimizer steps the ranks
      average their parameters (local steps, docs/guide/local-steps.md). "auto": as many as skewed data allow, from 1
      to ``sync_every_max`` (64).
    * ``evaluate``: for "auto", a function of the model that was given to ``attach``, and of ``evaluate_batch``: data
      like those that this rank trains on, in any form. It returns a number that is, as ``evaluate_metric`` says, an
      "accuracy" from 0 to 1, or a "loss": a cross-entropy in nats, or another loss's logarithm. It is called every few
      rounds, in evaluation mode and without gradients, and must not do collective operations.
    * ``outer``: how. "nesterov" (the default): Nesterov momentum on the mean difference of the parameters since the
      last time, with ``outer_lr`` (0.7) and ``outer_momentum`` (0.9), as DiLoCo. "average": the mean of the parameters,
      as local SGD, which is the default of "auto". If ``sync_every`` is 1, it has to be given.
    * ``outer_overlap``: parameters are averaged in fragments, which travel under so many steps; less than
      ``sync_every``. 0: all at once, while training waits. Default: the steps from one fragment to the next, and one
      more.
    * ``outer_merge``: the share of a rank's own parameters when a fragment is applied that has travelled under steps;
      0.5 by default.
    * ``inner``: "host": the ranks of one host average their gradients in every step, as with DDP, and parameters are
      averaged between hosts.
    * ``max_ctas``: NCCL's kernels for blocks use at most so many thread blocks, so that more of the GPU is left to
      compute that runs beside them, and blocks may take longer. Default: NCCL chooses. For NCCL only.
    * ``register_buffers``: gradients lie in memory that is registered with NCCL's communicator, so that it can send
      them from there, where its network and algorithm are able to. For NCCL only.
    * ``compare_every``: every so many steps the ranks compare what they have received, and raise if it differs. 0:
      never.
    * ``timeout_s``: an operation on the network fails after this time (default: that of the process group).
    * ``stall_warning_s``: a wait that takes longer, or longer than a quarter of the timeout, is logged with its cause.
    * ``dump_dir``: folder for the last events of all ranks when one fails (default: the folder for temporary files).
    * ``timeline_steps``: the number of steps that the record holds.
    * ``on_alarm``: called with a ``gradcast.alarms.Alarm`` when steps take longer than expected, on each rank that has
      one, after the same step. It must not do collective operations. What it raises is logged, and training goes on.
    """

    warmup_steps: int = 6
    plan: str | None = None
    policy: str = _core.DEFAULT_POLICY
    policy_parameters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_flight: int = 1
    adapt: bool = True
    wire: str = "fp32"
    max_grad_norm: float | None = None
    grad_norm_type: float = 2.0
    max_grad_value: float | None = None
    weight: str | None = None
    broadcast_buffers: bool = True
    unseen_reads: str = "by_module"
    split_compiled: bool = False
    sync_every: int | str | None = None
    sync_every_max: int | None = None
    evaluate: Callable[[Any, Any], Any] | None = None
    evaluate_batch: Any = dataclasses.field(default=None, repr=False, compare=False)
    evaluate_metric: str | None = None
    outer: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_overlap: int | None = None
    outer_merge: float | None = None
    inner: str | None = None
    max_ctas: int | None = None
    register_buffers: bool = False
    compare_every: int = 0
    timeout_s: float | None = None
    stall_warning_s: float = 30.0
    dump_dir: str | None = None
    timeline_steps: int = 16
    on_alarm: Callable[[Alarm], Any] | None = None
    # Whether every step clips. Otherwise (frameworks/clipping.py) only one before which the program has asked for it.
    clips_unasked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "in_flight", "timeline_steps", "compare_every", "max_ctas"):
            _require_int(name, getattr(self, name))
        for name in ("plan", "dump_dir"):
            if not isinstance(getattr(self, name), str | os.PathLike | None):
                raise Error(f"options.{name} is {getattr(self, name)!r}; a path is expected")
        if self.on_alarm is not None and not callable(self.on_alarm):
            raise Error(f"options.on_alarm is {self.on_alarm!r}; a function of an alarm is expected")
        _require_positive("stall_warning_s", self.stall_warning_s, _SECONDS_MAX)
        for name, most in (("timeout_s", _SECONDS_MAX), ("max_grad_norm", None), ("max_grad_value", None)):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name), most)
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise Error("options.max_grad_norm and options.max_grad_value are both given; choose one")
        if self.max_grad_norm is None and self.grad_norm_type != 2.0:
            raise Error("options.grad_norm_type is given without max_grad_norm; give both, or leave it out")
        if self.grad_norm_type != float("inf"):
            _require_positive("grad_norm_type", self.grad_norm_type)
        if self.wire not in list(WIRE_SHARES):
            raise Error(f"options.wire is {self.wire!r}; one of {', '.join(WIRE_SHARES)} is expected")
        if self.weight not in [None, "samples"]:
            raise Error(f"options.weight is {self.weight!r}; samples or None is expected")
        if self.unseen_reads not in ["by_module", "before_forward"]:
            raise Error(f"options.unseen_reads is {self.unseen_reads!r}; by_module or before_forward is expected")
        _check_local_steps(self)
        policies = {policy.name: policy for policy in _core.policies()}
        if self.policy not in policies:
            raise Error(f"options.policy is {self.policy!r}; one of {', '.join(policies)} is expected")
        policy = policies[self.policy]
        if policy.needs_scatter_gather:
            raise Error(
                f"options.policy is {self.policy!r}, which needs other operations than all-reduce; choose another"
            )
        known = [parameter.name for parameter in policy.parameters]
        if not isinstance(self.policy_parameters, Mapping):
            raise Error(f"options.policy_parameters is {self.policy_parameters!r}; numbers by name are expected")
        for name, value in self.policy_parameters.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Error(f"options.policy_parameters has {value!r} for {name}; a number is expected")
            if name not in known:
                raise Error(f"options.policy_parameters has {name!r}; {self.policy} knows {', '.join(known) or 'none'}")

    @property
    def clips(self) -> bool:
        return self.max_grad_norm is not None or self.max_grad_value is not None

    @property
    def sync_every_limit(self) -> int:
        """The most steps between averages. REQUIRES: ``sync_every`` is given."""
        if isinstance(self.sync_every, int):
            return self.sync_every
        return LIMIT if self.sync_every_max is None else self.sync_every_max

    @property
    def outer_averages(self) -> bool:
        """Whether the outer optimizer takes the mean of the parameters. "auto" may come to H = 1, where Nesterov's
        momentum would move them seven times as far as one process with all batches."""
        return self.outer == "average" or (self.outer is None and self.sync_every == "auto")

    @property
    def plan_path(self) -> str | None:
        """The plan file to follow, from the options or the environment."""
        return self.plan or os.environ.get(PLAN_VARIABLE) or None


def _check_local_steps(options: Options) -> None:
    every = options.sync_every
    if every is None:
        for name in (*_OUTER, *_AUTO):
            if getattr(options, name) is not None:
                raise Error(f"options.{name} is given without sync_every; give both, or leave it out")
        return
    if every == "auto":
        _check_auto(options)
    elif isinstance(every, str):
        raise Error(f"options.sync_every is {every!r}; a whole number of at least 1, or auto, is expected")
    else:
        _require_int("sync_every", every)
        for name in _AUTO:
            if getattr(options, name) is not None:
                raise Error(f"options.{name} belongs to sync_every='auto', and sync_every is {every}; leave it out")
    limit = options.sync_every_limit
    if options.outer not in [None, "nesterov", "average"]:
        raise Error(f"options.outer is {options.outer!r}; nesterov or average is expected")
    if every == 1 and options.outer is None:
        raise Error(
            "options.sync_every is 1 and outer is not given: to average in every step, that is DDP: leave it out, or "
            "name options.outer if the ranks are to average their parameters in every step"
        )
    for name in ("outer_lr", "outer_momentum"):
        value = getattr(options, name)
        if value is not None and options.outer_averages:
            why = "sync_every='auto' averages unless outer is given" if options.outer is None else "outer is 'average'"
            raise Error(f"options.{name} belongs to outer='nesterov', and {why}; leave one of them out")
    if options.outer_lr is not None:
        _require_positive("outer_lr", options.outer_lr)
    _require_share("outer_momentum", options.outer_momentum)
    if options.outer_overlap is not None:
        _require_int("outer_overlap", options.outer_overlap)
        if options.outer_overlap >= limit:
            raise Error(
                f"options.outer_overlap is {options.outer_overlap} steps and sync_every {limit}; a fragment has to be "
                f"applied before it is taken again, so at most {limit - 1} is expected"
            )
    if options.outer_merge is not None and (options.outer_overlap == 0 or every == 1):
        raise Error(
            "options.outer_merge is given, and nothing travels under steps (outer_overlap 0 or sync_every 1), so there "
            "is nothing to merge; leave it out"
        )
    _require_share("outer_merge", options.outer_merge)
    if options.inner not in [None, "host"]:
        raise Error(f"options.inner is {options.inner!r}; host or None is expected")
    defaults = {field.name: field.default for field in dataclasses.fields(Options)} | {"policy_parameters": {}}
    for name, why in _NOT_LOCAL.items():
        if getattr(options, name) != defaults[name]:
            raise Error(f"options.{name} is given with sync_every, and {why}; leave one of them out")


def _check_auto(options: Options) -> None:
    if not callable(options.evaluate):
        raise Error(
            "options.sync_every is 'auto', which needs options.evaluate, a function of the model and "
            f"options.evaluate_batch that returns its loss or accuracy; it is {options.evaluate!r}"
        )
    if options.evaluate_metric not in METRICS:
        raise Error(
            f"options.evaluate_metric is {options.evaluate_metric!r}; {' or '.join(METRICS)} is expected, as "
            "options.evaluate returns it"
        )
    _require_int("sync_every_max", options.sync_every_max)


# From a value on that works, to one above which nothing sensible lies: more memory or time than anybody meant, or more
# than there is to use. NCCL has at most 64 channels.
_LIMITS = {
    "warmup_steps": (3, 1000),
    "in_flight": (1, 1024),
    "timeline_steps": (1, 10_000),
    "compare_every": (0, 1_000_000),
    "max_ctas": (1, 64),
    "sync_every": (1, 100_000),
    "sync_every_max": (2, 100_000),
    "outer_overlap": (0, 100_000),
}
_SECONDS_MAX = 7 * 24 * 3600
_AUTO = ("sync_every_max", "evaluate", "evaluate_batch", "evaluate_metric")
_OUTER = ("outer", "outer_lr", "outer_momentum", "outer_overlap", "outer_merge", "inner")
_PLANLESS = "local steps follow no measured plan"
_NOT_LOCAL = {
    "warmup_steps": _PLANLESS,
    "plan": _PLANLESS,
    "policy": _PLANLESS,
    "policy_parameters": _PLANLESS,
    "in_flight": _PLANLESS,
    "adapt": _PLANLESS,
    "on_alarm": "alarms compare steps with a plan, which local steps have not",
    "max_grad_norm": "gradients of single ranks are clipped: call clip_grad_norm_ before step()",
    "max_grad_value": "gradients of single ranks are clipped: call clip_grad_value_ before step()",
    "weight": "no gradients travel that could be weighed",
    "broadcast_buffers": "buffers are averaged once a round",
    "unseen_reads": "forward waits for nothing",
    "split_compiled": "forward waits for nothing",
    "register_buffers": "no gradients travel",
    "compare_every": "the ranks' global copies are compared in every round",
}


def _require_share(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise Error(f"options.{name} is {value!r}; a number from 0 and below 1 is expected")


def _require_int(name: str, value: object) -> None:
    """Where None is allowed, it is the default."""
    least, most = _LIMITS[name]
    if value is None and Options.__dataclass_fields__[name].default is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Error(f"options.{name} is {value!r}; a whole number of at least {least} and at most {most} is expected")


def _require_positive(name: str, value: object, most: float | None = None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf") or (most is not None and value > most):
        to = "" if most is None else f" and at most {most}"
        raise Error(f"options.{name} is {value!r}; a number above 0{to} is expected")
