"""What a training loop does besides: pieces of code, by the moment at which they run. They stand in features.txt.

A feature there is its name in brackets with options, and a piece of code for each moment. ``made``: model and
optimizers exist, nothing is attached. ``attached``: before the loop. In each step: ``start``, ``forward`` (before the
last forward pass), ``loss`` (after it), ``between`` (after backward, before step()), ``stepped``, ``end``. Pieces of a
step run in some steps of a program only; with ``always`` in each.

Names that they may use: model, params (with gradients at the beginning), optimizers, optimizer (the first), called
(what the loop calls), handle (None with DDP), rank, step, x, y, loss; ``seen`` gets what the sides are compared by;
``kept`` is compared at the end.
"""

import dataclasses
import pathlib
import re
import textwrap

MOMENTS = ("made", "attached", "start", "forward", "loss", "between", "stepped", "end")
IN_A_STEP = MOMENTS[2:]


@dataclasses.dataclass(frozen=True)
class Feature:
    name: str
    code: dict[str, str]
    always: bool = False
    unused: bool = False  # a parameter may stay without a gradient
    tags: frozenset[str] = frozenset()  # what a program with it has: parts and wrappers may not go with that
    without: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()  # what a program with it must have
    weight: float = 1.0


def _features(text: str) -> tuple[Feature, ...]:
    found = re.split(r"^\[(.+)\](.*)\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]
    return tuple(_feature(*found[index : index + 3]) for index in range(0, len(found), 3))


def _feature(name: str, options: str, text: str) -> Feature:
    pieces = re.split(r"^(\w+):\n", text, flags=re.MULTILINE)[1:]
    code = {moment: textwrap.dedent(piece).strip() for moment, piece in zip(pieces[::2], pieces[1::2], strict=True)}
    assert set(code) <= set(MOMENTS), f"feature '{name}' has code for {list(code)}, not for {MOMENTS}"
    given = dict(option.partition("=")[::2] for option in options.split())
    return Feature(
        name,
        code,
        always="always" in given,
        unused="unused" in given,
        tags=frozenset(given.get("tags", "").split(",")) - {""},
        without=frozenset(given.get("without", "").split(",")) - {""},
        needs=frozenset(given.get("needs", "").split(",")) - {""},
        weight=float(given.get("weight", 1)),
    )


FEATURES = _features((pathlib.Path(__file__).parent / "features.txt").read_text())
BY_NAME = {feature.name: feature for feature in FEATURES}
