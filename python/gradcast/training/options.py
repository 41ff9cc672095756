"""The settings of ``attach``, checked when they are made. Settings that belong together are a group."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.errors import Error
from gradcast.host_traffic import WIRE_SHARES
from gradcast.local_pace import LIMIT, METRICS

# This module alone reads the variable.
PLAN_VARIABLE = "GRADCAST_PLAN"

_Check = dict[str, Any]  # metadata of a field


def _check(accepts: Callable[[Any], bool], expected: str) -> _Check:
    """``expected`` completes "... is expected". None is accepted, too, where it is the default."""
    return {"accepts": accepts, "expected": expected}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(least: int, most: int, *others: str) -> _Check:
    """From a value on that works, to one above which nothing sensible lies: more memory or time than anybody meant, or
    more than there is to use."""
    return _check(
        lambda value: value in others or (_is_number(value) and isinstance(value, int) and least <= value <= most),
        " or ".join((f"a whole number of at least {least} and at most {most}", *others)),
    )


def _one_of(*values: str | None) -> _Check:
    *others, last = map(str, values)
    return _check(lambda value: value in values, f"{', '.join(others)} or {last}")


def _made_by(group: type) -> _Check:
    return _check(lambda value: isinstance(value, group), f"a gradcast.{group.__name__}")


_POSITIVE = _check(lambda value: _is_number(value) and 0 < value < float("inf"), "a number above 0")
_SECONDS = _check(lambda value: _is_number(value) and 0 < value <= 604_800, "a number above 0 and at most 604800")
_SHARE = _check(lambda value: _is_number(value) and 0 <= value < 1, "a number from 0 and below 1")
_PATH = _check(lambda value: isinstance(value, str | os.PathLike), "a path")


@dataclass(frozen=True)
class _Group:
    _prefix: ClassVar[str]  # of a field's name in messages

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        cls._prefix = prefix or cls._prefix

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.metadata:
                self._require(each.name, each.metadata, each.default)

    def _require(self, name: str, check: Mapping[str, Any], default: Any = ...) -> None:
        value = getattr(self, name)
        if not (value is None and default is None) and not check["accepts"](value):
            raise Error(f"{self._prefix}.{name} is {value!r}; {check['expected']} is expected")


@dataclass(frozen=True)
class Planning(_Group, prefix="options.plan"):
    """Settings of measuring and planning.

    * ``file``: a file with a plan to follow instead of one made from the measurements. The environment variable
      GRADCAST_PLAN does the same.
    * ``warmup_steps``: steps that are measured before the first plan, at least 3. The first one does not count, because
      memory is allocated in it.
    * ``policy``, ``policy_parameters``, ``in_flight``: as for ``gradcast dev plan``, except that the default policy has
      a block_tolerance of 0.005 here: of the plans whose predicted step is at most 0.5 % longer than the best one, it
      takes the one with the fewest blocks. A measured start-up cost may be far too low, even 0, and a plan of many
      blocks pays the true one for each.
    * ``adapt``: gradcast measures and plans again when the network or compute has changed, tries the DDP baseline from
      time to time, and keeps to it if it is as fast. Off: the first plan is followed in any case.
    """

    file: str | None = field(default=None, metadata=_PATH)
    warmup_steps: int = field(default=6, metadata=_whole(3, 1000))
    policy: str = _core.DEFAULT_POLICY
    policy_parameters: Mapping[str, float] = field(default_factory=dict)
    in_flight: int = field(default=1, metadata=_whole(1, 1024))
    adapt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        policies = {policy.name: policy for policy in _core.policies()}
        self._require("policy", _one_of(*policies))
        if policies[self.policy].needs_scatter_gather:
            raise Error(
                f"options.plan.policy is {self.policy!r}, which needs other operations than all-reduce; choose another"
            )
        known = [parameter.name for parameter in policies[self.policy].parameters]
        self._require("policy_parameters", _check(lambda given: isinstance(given, Mapping), "a dict of numbers"))
        for name, value in self.policy_parameters.items():
            where = f"options.plan.policy_parameters has {value!r} for {name!r}"
            if name not in known:
                raise Error(f"{where}; {self.policy} knows {', '.join(known) or 'none'}")
            if not _is_number(value):
                raise Error(f"{where}; a number is expected")

    @property
    def path(self) -> str | None:
        """The plan file to follow, from the options or the environment."""
        return self.file or os.environ.get(PLAN_VARIABLE) or None


@dataclass(frozen=True)
class Clip(_Group, prefix="options.clip"):
    """Clipping of all gradients in every step, in overlap mode. Choose ``norm`` or ``value``.

    * ``norm``, ``norm_type``: as ``clip_grad_norm_(module.parameters(), norm, norm_type)`` before ``step()``. As long
      as the ranks' norms prove that nothing is to be clipped, the step overlaps with forward as without clipping;
      otherwise it waits for all gradients. Norm types other than 1, 2 and inf always wait.
    * ``value``: as ``clip_grad_value_(module.parameters(), value)``; it never waits.

    Gradients that are not averaged (a step whose passes are all under ``no_sync()``) are not clipped.
    """

    # Every step clips. Otherwise (frameworks/clipping.py) only one before which the program has asked for it.
    unasked: ClassVar[bool] = True

    norm: float | None = field(default=None, metadata=_POSITIVE)
    norm_type: float = field(
        default=2.0, metadata=_check(lambda value: _is_number(value) and value > 0, "a number above 0")
    )
    value: float | None = field(default=None, metadata=_POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm is not None and self.value is not None:
            raise Error("options.clip.norm and options.clip.value are both given; choose one")
        if self.norm is None and self.norm_type != 2.0:
            raise Error("options.clip.norm_type is given without norm; give both, or omit it")


@dataclass(frozen=True)
class LocalSteps(_Group, prefix="options.local"):
    """Another algorithm (docs/guide/local-steps.md): gradients stay on their rank, and the ranks average parameters.

    * ``every``: after so many optimizer steps. "auto": as many as skewed data allow, from 1 to ``every_max`` (64).
    * ``evaluate``: for "auto", a function of the model that was given to ``attach``, and of ``evaluate_batch``: data
      like those that this rank trains on, in any form. It returns a number that is, as ``evaluate_metric`` says, an
      "accuracy" from 0 to 1, or a "loss": a cross-entropy in nats, or another loss's logarithm. It is called every few
      rounds, in evaluation mode and without gradients, and must not do collective operations.
    * ``outer``: the outer optimizer. "nesterov" (the default): Nesterov momentum on the mean difference of the
      parameters since the last time, with ``lr`` (0.7) and ``momentum`` (0.9), as DiLoCo. "average": the mean of the
      parameters, as local SGD, which is the default of "auto". If ``every`` is 1, it has to be given.
    * ``overlap``: parameters are averaged in fragments, each of which is sent during so many steps; less than
      ``every``. 0: all at once, while training waits. Default: the steps from one fragment to the next, and one more.
    * ``merge``: the share of a rank's own parameters when a fragment is applied that was sent during steps; 0.5 by
      default.
    * ``inner``: "host": the ranks of one host average their gradients in every step, as with DDP, and parameters are
      averaged between hosts.
    """

    every: int | str = field(metadata=_whole(1, 100_000, "auto"))
    every_max: int | None = field(default=None, metadata=_whole(2, 100_000))
    evaluate: Callable[[Any, Any], Any] | None = None
    evaluate_batch: Any = field(default=None, repr=False, compare=False)
    evaluate_metric: str | None = None
    outer: str | None = field(default=None, metadata=_one_of("nesterov", "average"))
    lr: float | None = field(default=None, metadata=_POSITIVE)
    momentum: float | None = field(default=None, metadata=_SHARE)
    overlap: int | None = None
    merge: float | None = field(default=None, metadata=_SHARE)
    inner: str | None = field(default=None, metadata=_one_of("host", None))

    def __post_init__(self) -> None:
        super().__post_init__()
        # A fragment has to be applied before it is taken again.
        self._require("overlap", _whole(0, self.limit - 1), None)
        if self.every == "auto":
            self._require("evaluate", _check(callable, "a function of model and evaluate_batch, for every='auto',"))
            self._require("evaluate_metric", _one_of(*METRICS))
        else:
            given = ("every_max", "evaluate", "evaluate_batch", "evaluate_metric")
            self._exclude(given, f"belongs to every='auto', and every is {self.every}")
        if self.every == 1 and self.outer is None:
            raise Error(
                "options.local.every is 1 and outer is not given: to average in every step, that is DDP: omit "
                "options.local, or name outer if the ranks are to average their parameters in every step"
            )
        if self.averages:
            default = "" if self.outer else ", as every='auto' has by default"
            self._exclude(("lr", "momentum"), f"belongs to outer='nesterov', and outer is 'average'{default}")
        if self.overlap == 0 or self.every == 1:
            self._exclude(("merge",), "is given, and with overlap 0 or every 1 nothing is merged")

    def _exclude(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise Error(f"options.local.{name} {why}; omit it")

    @property
    def limit(self) -> int:
        """The most steps between averages."""
        return self.every if isinstance(self.every, int) else self.every_max or LIMIT

    @property
    def averages(self) -> bool:
        """The outer optimizer takes the mean of the parameters. "auto" may come to H = 1, where Nesterov's momentum
        would move them seven times as far as one process with all batches."""
        return self.outer == "average" or (self.outer is None and self.every == "auto")


@dataclass(frozen=True)
class Nccl(_Group, prefix="options.nccl"):
    """Settings for blocks over NCCL. The rest is as in the program's process group: traffic class, network, limits of
    thread blocks.

    * ``max_ctas``: NCCL's kernels for blocks use at most so many thread blocks, so that more of the GPU is left to
      compute that runs beside them, and blocks may take longer. Default: NCCL chooses.
    * ``cta_policy``: "default", "efficiency" or "zero", as NCCL's NCCL_CTA_POLICY: whether its kernels may use fewer
      thread blocks at some cost in speed, or, where NCCL can, none.
    * ``register_buffers``: gradients lie in memory that is registered with NCCL's communicator, so that it can send
      them from there, where its network and algorithm are able to.
    * ``own_stream``: blocks run on gradcast's stream, not on one of the communicator's, which would cost each of them
      two waits of streams. Its priority is that of the program's process group. Off until a GPU has shown the gain.
    * ``event_times``: blocks are timed by events of the GPU, not by looking every 50 us whether they have ended: for
      networks that carry a block in less than a millisecond, such as NVLink. Off until a GPU has shown the gain.
    """

    max_ctas: int | None = field(default=None, metadata=_whole(1, 64))  # NCCL has at most 64 channels
    cta_policy: str | None = field(default=None, metadata=_one_of("default", "efficiency", "zero"))
    register_buffers: bool = False
    own_stream: bool = False
    event_times: bool = False


@dataclass(frozen=True)
class Watch(_Group, prefix="options.watch"):
    """Timeouts, records and alarms.

    * ``timeout_s``: an operation on the network fails after this time (default: that of the process group).
    * ``stall_warning_s``: a wait that takes longer, or longer than a quarter of the timeout, is logged with its cause.
    * ``dump_dir``: folder for the last events of all ranks when one fails (default: the folder for temporary files).
    * ``timeline_steps``: the number of steps that the record holds.
    * ``on_alarm``: called with a ``gradcast.alarms.Alarm`` when steps take longer than expected, on each rank that has
      one, after the same step. It must not do collective operations. What it raises is logged, and training goes on.
    """

    timeout_s: float | None = field(default=None, metadata=_SECONDS)
    stall_warning_s: float = field(default=30.0, metadata=_SECONDS)
    dump_dir: str | None = field(default=None, metadata=_PATH)
    timeline_steps: int = field(default=16, metadata=_whole(1, 10_000))
    on_alarm: Callable[[Alarm], Any] | None = field(default=None, metadata=_check(callable, "a function of an alarm"))


@dataclass(frozen=True)
class Options(_Group, prefix="options"):
    """Settings of ``attach``; the defaults need no change.

    * ``plan``: how plans are made, a ``gradcast.Planning``.
    * ``wire``: "bf16" or "fp16" sends fp32 gradients as 16-bit numbers: half the bytes, with loss. Each rank's numbers
      are rounded once, and their sum, made in fp32, once more. "int8": 8-bit numbers with one scale for each 128, a
      quarter of the bytes; every rank adds what rounding has taken to its next gradient (error feedback). Gradients of
      one dimension are sent unchanged. For tensors on the CPU. "fp32": all gradients are sent unchanged. ``attach``
      warns where a format sends no fewer bytes than fp32; in host memory on one host it uses fp32.
    * ``clip``: clipping inside the step, a ``gradcast.Clip``.
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
    * ``local``: another algorithm, a ``gradcast.LocalSteps``, or None. It excludes most other settings.
    * ``nccl``: settings for blocks over NCCL, a ``gradcast.Nccl``.
    * ``compare_every``: every so many steps the ranks compare what they have received, and raise if it differs. 0:
      never.
    * ``watch``: timeouts, records and alarms, a ``gradcast.Watch``.
    """

    plan: Planning = field(default_factory=Planning, metadata=_made_by(Planning))
    wire: str = field(default="fp32", metadata=_one_of(*WIRE_SHARES))
    clip: Clip = field(default=Clip(), metadata=_made_by(Clip))
    weight: str | None = field(default=None, metadata=_one_of("samples", None))
    broadcast_buffers: bool = True
    unseen_reads: str = field(default="by_module", metadata=_one_of("by_module", "before_forward"))
    split_compiled: bool = False
    local: LocalSteps | None = field(default=None, metadata=_made_by(LocalSteps))
    nccl: Nccl = field(default=Nccl(), metadata=_made_by(Nccl))
    compare_every: int = field(default=0, metadata=_whole(0, 1_000_000))
    watch: Watch = field(default=Watch(), metadata=_made_by(Watch))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in () if self.local is None else self.changed(_NOT_LOCAL):
            raise Error(f"options.{name} is given with options.local, and {_NOT_LOCAL[name]}; leave one of them out")

    def __setstate__(self, state: dict[str, Any]) -> None:
        Options.__init__(self, **state)  # a pickle of before there were groups is answered, too

    def changed(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns those of these settings ("watch.on_alarm") that are not the default, and their values."""
        default = Options()
        values = {name: (attrgetter(name)(self), attrgetter(name)(default)) for name in names}
        return {name: own for name, (own, usual) in values.items() if own != usual}

    @property
    def clips(self) -> bool:
        return self.clip.norm is not None or self.clip.value is not None


_NOT_LOCAL = {
    "plan": "local steps follow no measured plan",
    "clip": "gradients of single ranks are clipped: call clip_grad_norm_ or clip_grad_value_ before step()",
    "weight": "no gradients are sent that could be weighed",
    "broadcast_buffers": "buffers are averaged once a round",
    "unseen_reads": "forward waits for nothing",
    "split_compiled": "forward waits for nothing",
    "nccl.register_buffers": "no gradients are sent",
    "compare_every": "the ranks' global copies are compared in every round",
    "watch.on_alarm": "alarms compare steps with a plan, which local steps have not",
}

# The names of before there were groups answer with the new ones until the next release.
_GROUPS: dict[str, Any] = {"plan": Planning, "clip": Clip, "local": LocalSteps, "nccl": Nccl, "watch": Watch}
# Where a name belongs that Options does not take.
_PLACES = {each.name: (name, each) for name, group in _GROUPS.items() for each in fields(group)}
for _former, _name, _new in (
    ("plan", "plan", "file"),
    ("max_grad_norm", "clip", "norm"),
    ("grad_norm_type", "clip", "norm_type"),
    ("max_grad_value", "clip", "value"),
    ("sync_every", "local", "every"),
    ("sync_every_max", "local", "every_max"),
    ("outer_lr", "local", "lr"),
    ("outer_momentum", "local", "momentum"),
    ("outer_overlap", "local", "overlap"),
    ("outer_merge", "local", "merge"),
):
    _PLACES[_former] = (_name, _GROUPS[_name].__dataclass_fields__[_new])


def _answer(given: Mapping[str, Any]) -> str:
    """Says what to write instead of these names with these values."""
    arguments: dict[str, list[str]] = {}
    for former, value in given.items():
        group, place = _PLACES[former]
        own = arguments.setdefault(group, [])
        own += [] if value is None else [f"{place.name}={value!r}" if place.repr else f"{place.name}=..."]
    new = [f"{name}={_GROUPS[name].__name__}({', '.join(own)})" for name, own in arguments.items()]
    names = " and ".join(f"options.{former}" for former in given)
    return f"{names} {'is' if len(given) == 1 else 'are'} now {', '.join(new)}".replace("LocalSteps()", "None")


def _answering(made: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(made)
    def init(self: Options, *args: Any, **settings: Any) -> None:
        former = {name: each for name, each in settings.items() if name in _PLACES and not isinstance(each, _Group)}
        if former:
            raise Error(_answer(former))
        made(self, *args, **settings)

    return init


Options.__init__ = _answering(Options.__init__)  # type: ignore[method-assign]
