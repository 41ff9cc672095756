"""A program from a seed."""

import random
from collections.abc import Sequence
from typing import Any

from fuzz_training import loops, models
from fuzz_training.program import OPTIMIZERS, Program, Use

_TRIES = 200
_ZERO_CODES = (
    "for each in optimizers:\n    each.zero_grad()",
    "for each in optimizers:\n    each.zero_grad(set_to_none=step % 2 == 0)",
    "for each in optimizers:\n    each.zero_grad(set_to_none=False)",
    "called.zero_grad()",
    "model.zero_grad(set_to_none=False)",
    "for p in params:\n    p.grad = None",
    "for p in params:\n    if p.grad is not None:\n        p.grad.zero_()",
)
_DDP_OPTIONS = (
    "", "", "find_unused_parameters=True", "static_graph=True", "gradient_as_bucket_view=True", "bucket_cap_mb=0.001",
    "broadcast_buffers=False",
)  # fmt: skip


def program(seed: int, features: Sequence[str] = ()) -> Program:
    """``features``: some that it shall have; else the one whose turn it is: as many seeds in a row go through all."""
    features = features or [loops.FEATURES[seed % len(loops.FEATURES)].name]
    chance = random.Random(seed)
    for _ in range(_TRIES):
        made = _attempt(seed, chance, features)
        if made.is_coherent:
            return made
    raise AssertionError(f"no coherent program for seed {seed} with {features}")


def _attempt(seed: int, chance: random.Random, features: Sequence[str]) -> Program:
    steps = chance.choice([4, 5, 6, 7])
    names = [*features, *_some(chance, loops.FEATURES, chance.choice([0, 1, 1, 2, 2, 3, 4]))]
    uses = tuple(Use(name, _steps(chance, steps)) for name in dict.fromkeys(names))
    optimizer = chance.choice(list(OPTIMIZERS))
    wrapper = chance.choices(
        ["none", "ddp", "holder", "compiled ddp", "compiled", "fabric"], [12, 6, 2, 0.4, 0.4, 0.8]
    )[0]
    pinned = chance.random() < 0.95
    adapt = not pinned and chance.random() < 0.5
    micro_batches = chance.choice([1, 1, 1, 1, 2, 3])
    return Program(
        seed=seed,
        ranks=3 if chance.random() < 0.15 else 2,
        parts=tuple(_some(chance, models.PARTS, chance.choice([1, 2, 2, 3, 4, 5]))),
        wrapper=wrapper,
        ddp_options=chance.choice(_DDP_OPTIONS) if wrapper not in ("none", "compiled") else "",
        optimizer=optimizer,
        form=chance.choice(OPTIMIZERS[optimizer][2]),
        groups=chance.choice(["one", "one", "one", "two", "several"]),
        steps=steps if pinned else steps + 8,
        uses=uses,
        zero=chance.choice(["start", "start", "start", "end", "loss", "seldom"]),
        zero_code=chance.choice(_ZERO_CODES),
        micro_batches=micro_batches,
        no_sync=micro_batches > 1 and chance.random() < 0.7,
        stepping=chance.choices(["plain", "closure", "scaler", "unscaled", "seldom"], [14, 1, 1, 1, 1])[0],
        autocast=chance.random() < 0.05,
        pinned=pinned,
        adapt=adapt,
        max_grad_norm=chance.random() < 0.04,
        hands_over=seed % 2 == 0,
    )


def _some(chance: random.Random, things: Sequence[Any], count: int) -> list[str]:
    return [each.name for each in chance.choices(things, [thing.weight for thing in things], k=count)]


def _steps(chance: random.Random, steps: int) -> tuple[int, ...] | None:
    if chance.random() < 0.4:
        return None
    return tuple(sorted(chance.sample(range(steps), chance.randrange(1, steps))))
