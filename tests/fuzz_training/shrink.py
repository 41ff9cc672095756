"""The smallest program that still fails: parts, features and settings are taken away one by one."""

import dataclasses
from collections.abc import Callable, Iterator

from fuzz_training.program import Program

_PLAIN = Program(seed=0)
# From the largest simplification to the smallest.
_FIELDS = (
    "wrapper", "ddp_options", "groups", "optimizer", "form", "stepping", "micro_batches", "no_sync", "zero",
    "zero_code", "autocast", "adapt", "max_grad_norm", "ranks", "pinned",
)  # fmt: skip
_MOST_TRIALS = 80


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    trials = 0
    progress = True
    while progress and trials < _MOST_TRIALS:
        progress = False
        for candidate in _smaller(program):
            if trials >= _MOST_TRIALS:
                break
            trials += 1
            if fails(candidate):
                program, progress = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for field in ("uses", "parts"):
        values = getattr(program, field)
        for index in range(len(values)):
            yield dataclasses.replace(program, **{field: values[:index] + values[index + 1 :]})
    for field in _FIELDS:
        plain = getattr(_PLAIN, field)
        if getattr(program, field) != plain:
            candidate = dataclasses.replace(program, **{field: plain})
            if candidate.is_coherent:
                yield candidate
    for steps in (2, 3, program.steps - 1):
        if 0 < steps < program.steps:
            yield dataclasses.replace(program, steps=steps)
    for index, use in enumerate(program.uses):
        if use.steps is not None and len(use.steps) > 1:
            for step in use.steps:
                fewer = dataclasses.replace(use, steps=(step,))
                yield dataclasses.replace(program, uses=(*program.uses[:index], fewer, *program.uses[index + 1 :]))
