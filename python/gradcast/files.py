"""Profiles, plans and links on disk, and profiles with other times. Each error names the fault of the file."""

import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from gradcast import bench_results, documents
from gradcast._core import LinkModel, Plan, Profile
from gradcast.disk import read_text
from gradcast.documents import Wrong, list_of, number, one_of, record, text, that, whole
from gradcast.errors import Error
from gradcast.host_traffic import FORMS, WIRE_SHARES

T = TypeVar("T")

# By kind of file: a field that only this kind has, and the command that makes one.
_KINDS = {
    "plan": ("blocks", "gradcast dev plan"),
    "profile": ("tensors", "gradcast dev profile import"),
    "link": ("all_reduce", "gradcast dev link fit"),
}
# By the field "kind" of what programs print.
_PRINTED = {"gradcast-doctor": "run of gradcast doctor", "gradcast-bench": "result of gradcast-bench"}
DATA = resources.files("gradcast") / "data"
# Bundled ones whose times are no measurements (data/README.md): 100 ms of forward, 200 ms of backward.
ESTIMATED_PROFILES = ("bert_base", "gpt2", "inception_v3", "resnet152", "resnet18", "vit_b_16")


def _check_hosts(profile: dict[str, Any]) -> None:
    exchange = profile.get("exchange")
    if exchange is not None and len(exchange["host_of"]) != profile["world_size"]:
        count = len(exchange["host_of"])
        wrong = Wrong(f"has {count} ranks; those of world_size, {profile['world_size']}, are expected")
        raise wrong.inside("host_of").inside("exchange")


# What the core keeps of profiles and plans without reading it.
_EXCHANGE = record(
    {"host_of": list_of(whole(0, 2**31), least=1), "form": one_of(FORMS), "wire": one_of(list(WIRE_SHARES))}
)
_SHAPE = list_of(whole(0, 2**53))
_PROFILE = that(record({"tensors": list_of(record({}, {"shape": _SHAPE}))}, {"exchange": _EXCHANGE}), _check_hosts)
_MADE_WITH = record(
    {},
    {"profile": text, "scale": number(1e-12, 1e12), "network": text, "link": record({}), "hash": text}
    | {"tensors": list_of(text)},
)


def bundled_profiles() -> list[str]:
    return sorted(Path(entry.name).stem for entry in DATA.iterdir() if entry.name.endswith(".json"))


def scaled_profile(
    profile: Profile, factor: float, *, backward_factor: float | None = None, update_factor: float | None = None
) -> Profile:
    """Multiplies every time of the profile, as for another batch size or device. Unknown fields stay as they are.

    ``backward_factor``, ``update_factor``: for backward and for updates, if they differ from ``factor``.
    """
    backward = factor if backward_factor is None else backward_factor
    update = factor if update_factor is None else update_factor
    if factor == backward == update == 1:
        return profile
    tensors = [
        tensor.replace(
            ready_ns=round(tensor.ready_ns * backward),
            need_ns=round(tensor.need_ns * factor),
            update_ns=round(tensor.update_ns * update),
        )
        for tensor in profile.tensors
    ]
    return profile.replace(
        forward_ns=round(profile.forward_ns * factor),
        backward_ns=round(profile.backward_ns * backward),
        tensors=tensors,
    )


def load_profile(name_or_path: str, scale: float = 1.0) -> Profile:
    """Loads a profile by its bundled name ("resnet50") or from a JSON file, and multiplies its times by ``scale``."""
    if not 0 < scale < float("inf"):
        raise Error(f"scale is {scale}; it must be a number above 0, for instance 0.5")
    if name_or_path in bundled_profiles():
        text = (DATA / f"{name_or_path}.json").read_text(encoding="utf-8")
    elif Path(name_or_path).suffix == "" and not os.path.exists(name_or_path):
        names = ", ".join(bundled_profiles())
        raise Error(f"there is no profile {name_or_path}: it is neither a file nor a bundled profile ({names})")
    else:
        text = read_text(name_or_path, "profile")
    profile = _parsed(name_or_path, text, "profile", Profile.from_json)
    documents.checked(json.loads(profile.to_json()), _PROFILE, name_or_path, "invalid_profile")
    return rescaled_profile(profile, scale)


def rescaled_profile(profile: Profile, scale: float) -> Profile:
    """Returns ``scaled_profile`` for a user's factor. Raises Error if times become 0."""
    for key in ("forward_ns", "backward_ns"):
        if getattr(profile, key) * scale < 1 <= getattr(profile, key):
            raise Error(f"{scale:g} times {key} of {profile.name} is less than 1 ns; scale by more")
    return scaled_profile(profile, scale)


def stretched_profile(profile: Profile, forward_ns: float | None, backward_ns: float | None) -> Profile:
    """Returns the profile with other times of its passes, if given. Raises Error if a time of 0 is to be stretched."""
    factors = []
    for key, wanted_ns in (("forward_ns", forward_ns), ("backward_ns", backward_ns)):
        if wanted_ns is not None and getattr(profile, key) == 0:
            raise Error(f"{key} of {profile.name} is 0, which cannot be made {wanted_ns:g}")
        factors.append(1.0 if wanted_ns is None else wanted_ns / getattr(profile, key))
    return scaled_profile(profile, factors[0], backward_factor=factors[1])


def load_plan(path: str) -> tuple[Plan, dict[str, Any]]:
    """Returns a plan and its origin: some of the fields of ``_MADE_WITH``."""
    plan = _parsed(path, read_text(path, "plan"), "plan", Plan.from_json)
    fields = documents.checked(plan.extra, record({}, {"made_with": _MADE_WITH}), path, "invalid_plan")
    return plan, fields.get("made_with") or {}


def recorded_link(origin: dict[str, Any], path: str) -> LinkModel:
    """Returns the link in a plan's ``origin``. REQUIRES: it has one."""
    return _parsed(f"{path}: made_with", json.dumps(origin["link"]), "link", LinkModel.from_json)


def plan_hash(plan: Plan, profile: Profile) -> str:
    """Returns the hash that ranks compare, as text: JSON readers that use doubles would round a number."""
    return f"{plan.hash(profile):016x}"


def load_link(path: str) -> LinkModel:
    """Loads a link from a file of its own, or from results of gradcast-bench, which hold one."""
    text = read_text(path, "link")
    if _kind_of(text) == _PRINTED[bench_results.KIND]:
        results = bench_results.check_results(documents.parsed(text, path), path)
        if "link" not in results:
            raise Error(f"{path}: these results have no link; it takes a sweep of three sizes or more", "invalid_link")
        text = json.dumps(results["link"])
    return _parsed(path, text, "link", LinkModel.from_json)


def _parsed(path: str, text: str, expected: str, parse: Callable[[str], T]) -> T:
    """Parses a file. Errors name the file, and its kind if that is the fault."""
    try:
        return parse(text)
    except Error as error:
        kind = _kind_of(text)
        if kind is None or kind == expected:
            raise Error(f"{path}: {error}", error.code) from None
        message = f"{path}: this is a {kind}; a {expected} is expected: `{_KINDS[expected][1]}` makes one"
        raise Error(message, error.code) from None


def _kind_of(text: str) -> str | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if fields.get("kind") in list(_PRINTED):
        return _PRINTED[fields["kind"]]
    return next((kind for kind, (field, _) in _KINDS.items() if field in fields), None)
