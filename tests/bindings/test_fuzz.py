"""Mutated files: whatever happens to the bytes of a profile, plan, link or table, a reader takes them or says why not.

A seed is a case; a failure prints it. The many-seed run is `make test-long`.
"""

import json
import random

import pytest

import gradcast
from gradcast import _core
from gradcast.files import _DATA

TOKENS = [
    b"-1", b"0", b"1e308", b"1e-308", b"9007199254740993", b"-0.0", b"null", b"true", b'""', b"[]", b"{}", b"NaN",
    b"1e400", b"\x00", b"\xff", b'"', b",", b"[[[[", b"\\u0000", b"\\ud800", b"99999999999999999999", b"\n", b"\r\n",
]  # fmt: skip


def mutate(data: bytes, seed: int) -> bytes:
    """A few changes at random places: cut, repeat, overwrite, insert, or swap a number for an odd one."""
    rng = random.Random(seed)
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not result:
            break
        at = rng.randrange(len(result))
        length = rng.choice([1, 2, 8, 100])
        kind = rng.randrange(6)
        if kind == 0:
            del result[at : at + length]
        elif kind == 1:
            result[at:at] = result[at : at + length]
        elif kind == 2:
            result[at] = rng.randrange(256)
        elif kind == 3:
            result[at:at] = rng.choice(TOKENS)
        elif kind == 4:
            del result[at:]
        else:
            end = at
            while at > 0 and chr(result[at - 1]) in "0123456789.-":
                at -= 1
            while end < len(result) and chr(result[end]) in "0123456789.-":
                end += 1
            result[at:end] = rng.choice(TOKENS)
    return bytes(result)


def small_profile() -> gradcast.Profile:
    fields = json.loads((_DATA / "vgg16.json").read_text())
    fields["link"] = json.loads(_core.ring_link(_core.Hop(latency_ns=5e4, bandwidth_bytes_per_s=1e9), 8).to_json())
    return gradcast.Profile.from_json(json.dumps(fields))


def use_profile(profile: gradcast.Profile) -> None:
    """A profile that was accepted survives being written, and can be planned without surprises."""
    assert gradcast.Profile.from_json(profile.to_json()).to_json() == profile.to_json()
    if profile.link is not None:
        plan = gradcast.make_plan(profile, profile.link, policy="ddp")
        assert plan.predicted_ns >= plan.bound_ns * (1 - 1e-9) - 1


def readers():
    profile = small_profile()
    plan = gradcast.make_plan(profile, profile.link)

    def use_plan(changed: gradcast.Plan) -> None:
        assert gradcast.Plan.from_json(changed.to_json()).to_json() == changed.to_json()
        gradcast.play(profile, profile.link, changed)

    return {
        "profile": (profile.to_json(), gradcast.Profile.from_json, use_profile),
        "plan": (plan.to_json(), gradcast.Plan.from_json, use_plan),
        "link": (profile.link.to_json(), gradcast.LinkModel.from_json, lambda link: link.all_reduce.cost_ns(1)),
        "table": (
            (_DATA / "layers_vgg16.csv").read_text(),
            lambda text: gradcast.Profile.from_layer_table(csv=text),
            use_profile,
        ),
    }


def fuzz(kind: str, seeds: range) -> int:
    """How many mutants were accepted; anything but acceptance or gradcast.Error is a failure."""
    text, read, use = readers()[kind]
    accepted = 0
    for seed in seeds:
        mutant = mutate(text.encode(), seed).decode("utf-8", errors="surrogateescape")
        try:
            # Files are read as UTF-8 in files.py; what is not, never gets here.
            mutant.encode()
        except UnicodeEncodeError:
            continue
        try:
            use(read(mutant))
        except gradcast.Error as error:
            if error.code == "internal":
                pytest.fail(f"{kind}, seed {seed}: {error}")
            assert str(error)  # noqa: PT017
        except Exception as error:
            pytest.fail(f"{kind}, seed {seed}: {type(error).__name__}: {error}")
        else:
            accepted += 1
    return accepted


@pytest.mark.parametrize("kind", ["profile", "plan", "link", "table"])
def test_mutants(kind):
    accepted = fuzz(kind, range(1500))
    # Some get through (a changed digit, a changed name) and most do not; otherwise the mutator tests nothing.
    assert 0 < accepted < 1400


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["profile", "plan", "link", "table"])
def test_many_mutants(kind):
    assert fuzz(kind, range(1500, 100_000)) > 0
