"""The variants of ``gradcast dev lab train``: ways of sending gradients, and their names."""

from dataclasses import dataclass, replace

from gradcast import _core
from gradcast.comparison.ddp_baseline import SWEPT_CAPS_MIB
from gradcast.host_traffic import NARROW_WIRES
from gradcast.lab.errors import LabError

COMPUTE = "alone"  # sends nothing, so it shows the compute time; its ranks diverge
BASELINE = "ddp"
DDP_NEAR, DDP_MGWFBP = "ddp-near", "ddp-mgwfbp"
TORCH_CAPS_MIB = (1, 25)  # sizes of DDP's first bucket and of the others by default

_SWEEP = tuple(f"ddp:{cap}" for cap in SWEPT_CAPS_MIB)
_POLICIES = tuple(f"overlap:{policy}" for policy in ("p3", "bytescheduler", "prophet", "dcredit", "mgwfbp"))
# Names that stand for several variants.
_GROUPS = {
    "ddp-sweep": _SWEEP,
    "policies": _POLICIES,
    "all": (BASELINE, *_SWEEP, DDP_MGWFBP, "hook", "overlap", *_POLICIES),
}
_MODES = ("overlap", "hook")
_FIXED = "fixed"
EXAMPLES = (
    "ddp, ddp:8, ddp-sweep, ddp-near, ddp-mgwfbp, hook, overlap, overlap-fixed, overlap-bf16, overlap/2, overlap:p3, "
    "policies, all"
)


@dataclass(frozen=True)
class Variant:
    """One way of sending gradients. ``mode`` is "alone", "ddp", "hook" or "overlap"."""

    name: str
    mode: str
    # Sizes of DDP's buckets; the last one also of all that follow. Empty for torch's default.
    caps_mib: tuple[float, ...] = ()
    policy: str | None = None  # None for the default
    in_flight: int | None = None  # gradcast's blocks in flight; None for that of the settings
    adapt: bool = True  # whether gradcast may change its plan during training
    wire: str = "fp32"

    @property
    def by_gradcast(self) -> bool:
        return self.mode in _MODES


def names_of(text: str) -> list[str]:
    """Parses names separated by commas. Groups are replaced by their members. Raises LabError for an unknown name.

    "ddp" and "alone", with which the others are compared, are always included. ``ddp-near`` and ``ddp-mgwfbp`` stay in
    the result: a measured training decides their buckets.
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked:
        raise LabError(f"no variant is named; write some of {EXAMPLES}")
    names = [member for name in asked for member in _GROUPS.get(name, (name,))]
    for name in names:
        if name not in (DDP_NEAR, DDP_MGWFBP):
            variant(name)
    return list(dict.fromkeys([COMPUTE, BASELINE, *names]))


def variant(name: str) -> Variant:
    """Returns the variant with this name. Raises LabError for an unknown name. REQUIRES: not ddp-near or ddp-mgwfbp."""
    base, colon, detail = name.partition(":")
    if base == BASELINE:
        return Variant(name, "ddp", caps_mib=(_cap_mib(name, detail),) if colon else ())
    if base in _MODES and colon:
        _check_policy(name, detail)
        # A policy is followed whatever it costs, since it is what is compared.
        return Variant(name, base, policy=detail, adapt=False)
    if "/" in name:
        return _with_in_flight(name)
    mode, _, detail = name.partition("-")
    if name in _MODES or (mode in _MODES and detail in (_FIXED, *NARROW_WIRES)):
        return Variant(name, mode, adapt=detail != _FIXED, wire=detail if detail in NARROW_WIRES else "fp32")
    if name == COMPUTE:
        return Variant(name, COMPUTE)
    raise LabError(f"there is no variant '{name}'; there are {EXAMPLES}")


def _with_in_flight(name: str) -> Variant:
    """Returns the variant of a name such as "overlap/2": at most two blocks in flight."""
    mode, _, count = name.partition("/")
    if mode not in _MODES or count not in ("1", "2", "3", "4"):
        raise LabError(
            f"there is no variant '{name}'; overlap/2 and hook/2 are gradcast with two blocks in flight, 1 to 4 work"
        )
    return Variant(name, mode, in_flight=int(count))


def scaled(each: Variant, factor: float) -> Variant:
    """Returns the variant for a model with scaled tensors: DDP's buckets are scaled by the same factor."""
    if each.mode != "ddp" or factor == 1:
        return each
    return replace(each, caps_mib=tuple(factor * cap for cap in each.caps_mib or TORCH_CAPS_MIB))


def _cap_mib(name: str, text: str) -> float:
    try:
        cap = float(text)
    except ValueError:
        cap = 0.0
    if not 0 < cap <= 1e6:
        raise LabError(f"'{name}': the size of DDP's buckets is given in MiB; write for instance ddp:8")
    return cap


def _check_policy(name: str, policy: str) -> None:
    usable = [info.name for info in _core.policies() if not info.needs_scatter_gather]
    if policy not in usable:
        raise LabError(f"'{name}': no policy {policy} can be followed here; there are {', '.join(usable)}")
