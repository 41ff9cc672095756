"""Plans one profile with many policies and compares the results."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gradcast import _core
from gradcast.errors import Error

BASELINE = "ddp"
# A smaller gain is less than what steps on a cluster vary from one to the next.
NOTICEABLE_GAIN = 0.02
_BOUND_TOLERANCE = 0.0005


def has_other_ops(plan: _core.Plan) -> bool:
    """Returns True for a plan with reduce-scatters and all-gathers; the bound over all-reduces does not cover it."""
    return any(block.op != "all_reduce" for block in plan.blocks)


def ratio(time_ns: float, reference_ns: float) -> float:
    """``time_ns / reference_ns``, and 1 for 0 / 0: a profile without compute on a link without cost is valid."""
    if reference_ns == 0:
        return 1.0 if time_ns == 0 else float("inf")
    return time_ns / reference_ns


def same_bound(one_ns: float, other_ns: float) -> bool:
    """Returns True if two bounds look equal in a text."""
    return abs(one_ns - other_ns) <= _BOUND_TOLERANCE * max(one_ns, other_ns)


@dataclass(frozen=True)
class PolicyResult:
    plan: _core.Plan
    speedup_over_ddp: float

    @property
    def policy(self) -> str:
        return self.plan.policy

    @property
    def other_ops(self) -> bool:
        return has_other_ops(self.plan)

    @property
    def ratio_to_bound(self) -> float:
        return ratio(self.plan.predicted_ns, self.plan.bound_ns)

    @property
    def ratio_to_plain_bound(self) -> float:
        return ratio(self.plan.predicted_ns, self.plan.plain_bound_ns)


@dataclass(frozen=True)
class Comparison:
    compute_ns: float  # backward, forward and updates: no iteration is shorter
    link_ns: float  # all gradients in one all-reduce
    bound: _core.Bound  # over all plans that the link and the mode allow
    all_reduce_bound: _core.Bound  # over plans of all-reduces
    overlap_bound_ns: float  # the bound of overlap mode
    rows: list[PolicyResult]  # the fastest first
    ddp: _core.Plan
    skipped: dict[str, str] = field(default_factory=dict)  # by policy: why it has no row


def total_bytes(profile: _core.Profile) -> int:
    return sum(tensor.bytes for tensor in profile.tensors)


def compute_ns(profile: _core.Profile) -> float:
    return profile.backward_ns + profile.forward_ns + sum(tensor.update_ns for tensor in profile.tensors)


def link_of(profile: _core.Profile) -> _core.LinkModel:
    """Returns the profile's link. REQUIRES: it has one, as what several workers have measured has."""
    assert profile.link is not None, "several workers have measured a link"
    return profile.link


def parse_policies(text: str) -> list[str]:
    """Parses ``all`` or a list such as ``forecast,ddp``. Raises Error for an unknown policy."""
    known = [info.name for info in _core.policies()]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return known
    if not names:
        raise Error(f"no policy is named; write all, or some of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise Error(f"there is no policy {name}; there are {', '.join(known)} (and all)")
    return list(dict.fromkeys(names))


def has_scatter_gather(link: _core.LinkModel) -> bool:
    return link.reduce_scatter.available and link.all_gather.available


def _cannot_run(info: _core.PolicyInfo, link: _core.LinkModel, mode: str) -> str | None:
    if info.overlap_only and mode == "hook":
        return "it sends during the next forward pass, which hook mode does not allow"
    if info.needs_scatter_gather and not has_scatter_gather(link):
        return "the link has no costs for reduce_scatter and all_gather"
    return None


def compare(
    profile: _core.Profile, link: _core.LinkModel, policies: Iterable[str], *, mode: str = "overlap", in_flight: int = 1
) -> Comparison:
    """Plans with each policy that can run here, and with DDP, which all are compared with."""
    infos = {info.name: info for info in _core.policies()}
    ddp = _core.make_plan(profile, link, policy=BASELINE, mode=mode, in_flight=in_flight)
    rows: list[PolicyResult] = []
    skipped: dict[str, str] = {}
    for name in policies:
        reason = _cannot_run(infos[name], link, mode)
        if reason is not None:
            skipped[name] = reason
            continue
        try:
            plan = _core.make_plan(profile, link, policy=name, mode=mode, in_flight=in_flight)
        except Error as error:
            if error.code == "internal":
                raise
            skipped[name] = str(error)
            continue
        rows.append(PolicyResult(plan, ratio(ddp.predicted_ns, plan.predicted_ns)))
    scatter_gather = has_scatter_gather(link)
    bound = _core.bound(profile, link, mode=mode, in_flight=in_flight, any_op=mode == "overlap" and scatter_gather)
    # Of plans that are equal to a microsecond the one with fewer blocks comes first: it is cheaper to follow.
    rows.sort(key=lambda row: (round(row.plan.predicted_ns / 1e3), len(row.plan.blocks)))
    return Comparison(
        compute_ns=compute_ns(profile),
        link_ns=link.all_reduce.cost_ns(total_bytes(profile)),
        bound=bound,
        all_reduce_bound=_core.bound(profile, link, mode=mode, in_flight=in_flight),
        overlap_bound_ns=_core.bound(profile, link, in_flight=in_flight, any_op=scatter_gather).best_ns,
        rows=rows,
        ddp=ddp,
        skipped=skipped,
    )
