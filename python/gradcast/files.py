"""Reads and writes profiles, plans and other files; each error says what is wrong with the file."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from gradcast._core import LinkModel, Plan, Profile
from gradcast.errors import Error

T = TypeVar("T")

# By kind of file: a field that only this kind has, and the command that makes one.
_KINDS = {
    "plan": ("blocks", "gradcast dev plan"),
    "profile": ("tensors", "gradcast dev profile import"),
    "link": ("all_reduce", "gradcast dev link fit"),
}
_DATA = resources.files("gradcast") / "data"
# The mode of new files under the usual umask; temporary files are private, and would stay so when renamed.
_MODE = 0o644
# Bundled ones whose times are no measurements (data/README.md): 100 ms of forward, 200 ms of backward.
ESTIMATED_PROFILES = ("bert_base", "gpt2", "inception_v3", "resnet152", "resnet18", "vit_b_16")


def bundled_profiles() -> list[str]:
    return sorted(Path(entry.name).stem for entry in _DATA.iterdir() if entry.name.endswith(".json"))


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def read_text(path: str, what: str) -> str:
    """The text of a file that the user named. ``what``: its kind, for errors, such as "profile"."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Error(f"the {what} {path} does not exist; check the path") from None
    except OSError as error:
        raise Error(f"the {what} {path} cannot be read: {_reason(error)}") from None
    except UnicodeDecodeError:
        raise Error(f"the {what} {path} is not UTF-8 text; check that it is the right file") from None
    except ValueError as error:  # a zero byte in the path
        raise Error(f"the {what} {path!r} cannot be read: {error}") from None


def system_file(path: Path) -> str:
    """Returns the text of a file of /proc or /sys without surrounding white space, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def make_folder(path: str | Path) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"cannot create the folder {path}: {_reason(error)}", "environment") from None


def write_text(path: str, text: str, what: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Error(f"the {what} cannot be written to {path}: {_reason(error)}", "environment") from None


def write_atomically(path: str | Path, data: bytes | str, what: str) -> None:
    """Writes a file completely or not at all: readers see the old content or the new, never a part. ``what``: its kind,
    for errors, such as "report"."""
    target, temporary = Path(path), None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode("utf-8"))
        os.chmod(temporary, _MODE)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise Error(
            f"the {what} cannot be written to {target}: {_reason(error)}; name a file in an existing folder",
            "environment",
        ) from None


def check_writable(path: str, what: str) -> None:
    """Raises Error if the path cannot be written, so that long work does not end with that."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir():
        reason = "it is a folder; name a file"
    elif not folder.is_dir():
        reason = f"the folder {folder} does not exist; make it first"
    elif not os.access(folder, os.W_OK):
        reason = f"the folder {folder} is not writable"
    else:
        return
    raise Error(f"the {what} cannot be written to {path}: {reason}", "environment")


def scaled_profile(
    profile: Profile, factor: float, *, backward_factor: float | None = None, update_factor: float | None = None
) -> Profile:
    """Multiplies every time of the profile, as for another batch size or device. Unknown fields stay as they are.

    ``backward_factor``, ``update_factor``: for backward and for updates, if they differ from ``factor``.
    """
    factors = dict.fromkeys(("forward_ns", "need_ns"), factor)
    factors |= dict.fromkeys(("backward_ns", "ready_ns"), factor if backward_factor is None else backward_factor)
    factors["update_ns"] = factor if update_factor is None else update_factor
    if set(factors.values()) == {1}:
        return profile
    fields = json.loads(profile.to_json())
    for owner in (fields, *fields["tensors"]):
        for key in factors.keys() & owner.keys():
            owner[key] = round(owner[key] * factors[key])
    return Profile.from_json(json.dumps(fields))


def with_fields(profile: Profile, **fields: Any) -> Profile:
    """The profile with these fields of its JSON. All others, unknown ones included, stay as they are."""
    return Profile.from_json(json.dumps(json.loads(profile.to_json()) | fields))


def tensor_fields(profile: Profile) -> list[dict[str, Any]]:
    return json.loads(profile.to_json())["tensors"]


def load_profile(name_or_path: str, scale: float = 1.0) -> Profile:
    """Loads a profile by its bundled name ("resnet50") or from a JSON file, and multiplies its times by ``scale``."""
    if not 0 < scale < float("inf"):
        raise Error(f"scale is {scale}; it must be a number above 0, for instance 0.5")
    if name_or_path in bundled_profiles():
        text = (_DATA / f"{name_or_path}.json").read_text(encoding="utf-8")
    elif Path(name_or_path).suffix == "" and not os.path.exists(name_or_path):
        names = ", ".join(bundled_profiles())
        raise Error(f"there is no profile {name_or_path}: it is neither a file nor a bundled profile ({names})")
    else:
        text = read_text(name_or_path, "profile")
    return scaled_profile(_parsed(name_or_path, text, "profile", Profile.from_json), scale)


def load_plan(path: str) -> tuple[Plan, dict]:
    """A plan and all fields of its file, such as ``made_with``."""
    text = read_text(path, "plan")
    return _parsed(path, text, "plan", Plan.from_json), json.loads(text)


def plan_hash(plan: Plan, profile: Profile) -> str:
    """The hash that ranks compare. It is text because JSON readers that use doubles would round a number."""
    return f"{plan.hash(profile):016x}"


def load_link(path: str) -> LinkModel:
    return _parsed(path, read_text(path, "link"), "link", LinkModel.from_json)


def _parsed(path: str, text: str, expected: str, parse: Callable[[str], T]) -> T:
    """Adds the file's name to errors, and says if the file is one of another kind."""
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
    return next((kind for kind, (field, _) in _KINDS.items() if field in fields), None)
