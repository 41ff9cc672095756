"""Runs random training programs, each natively and attached. A program is a value that a seed gives. What it reads and
ends with is equal bit for bit, or gradcast refuses it.

A module of programs has ``program_of(seed)``. A program has ``mesh``, the names of the mesh's dimensions, of two ranks
each, ``tolerance``, by which results may differ, and ``training(rank, mesh, is_ours)``, whose ``train()`` returns what
is compared, and whose ``leave()`` detaches.
"""

import argparse
import importlib
import itertools
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gradcast
from training import compare
from training.needs import torch
from training.pool import Pool, RankError

LIMIT_S = 300.0  # of programs that run together


def run(rank, programs: list[Any], sides=(False, True)) -> list[tuple]:
    """Outcomes (state, text) of these programs, up to the first behind which the ranks have to start anew. ``sides``:
    natively, attached."""
    from torch.distributed.device_mesh import init_device_mesh

    names = programs[0].mesh
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    outcomes: list[tuple] = []
    for program in programs:
        found: list = []
        for is_ours in sides:
            try:
                training = program.training(rank, mesh, is_ours)
                found.append(training.train())
                training.leave()
            except Exception as error:
                is_refusal = isinstance(error, gradcast.Error) and error.code == "invalid_use"
                state = "refused" if is_refusal else "failed" if is_ours else "invalid"
                outcomes.append((state, str(error) if is_refusal else traceback.format_exc(limit=-6)))
                torch.distributed.destroy_process_group()  # so that ranks which wait for this one need not time out
                return outcomes
        differences = compare.trees(found[-1], found[0], nan_equal=True, tolerance=program.tolerance)
        outcomes.append(("different", "; ".join(differences[:4])) if differences else ("equal", ""))
    return outcomes


def verdict(found: tuple[tuple, ...]) -> tuple[str, str]:
    """The outcome of a program from that of each rank. "refused in part": other ranks have failed, or waited."""
    states, texts = {state for state, _ in found}, "\n".join(dict.fromkeys(text for _, text in found if text))
    worst = next((each for each in ("invalid", "refused", "failed", "different") if each in states), "equal")
    return (f"{worst} in part" if worst == "refused" and len(states) > 1 else worst), texts


def runs_natively(pool: Pool, program: Any) -> bool:
    try:
        pool.run(2 ** len(program.mesh), run, [program], (False,), timeout_s=LIMIT_S, wait_s=LIMIT_S / 10)
    except RankError:
        return False
    return True


def outcomes_of(pool: Pool, programs: list[Any], together: int = 25) -> Iterator[tuple[Any, str, str]]:
    """Runs programs of one mesh: "equal", "refused", "invalid" natively, "different" or "failed"; with a text.
    ``together``: so many run in the same process groups."""
    while programs:
        some = programs[:together]
        try:
            found = pool.run(2 ** len(some[0].mesh), run, some, timeout_s=LIMIT_S, wait_s=LIMIT_S / 10)
            done = [(each, *verdict(outcomes)) for each, outcomes in zip(some, zip(*found, strict=False), strict=False)]
        except RankError as error:  # some rank has died or hangs: one by one, then
            alone = [(some[0], "failed" if runs_natively(pool, some[0]) else "invalid", str(error))]
            done = alone if together == 1 else list(outcomes_of(pool, some, together=1))
        yield from done
        programs = programs[len(done) :]


def campaign(pool: Pool, programs: list[Any], tell=print) -> Counter:
    """Returns how many programs of each outcome there are, and tells of those that are not equal."""
    states: Counter = Counter()
    meshes = dict.fromkeys(each.mesh for each in programs)
    by_mesh = ([each for each in programs if each.mesh == mesh] for mesh in meshes)
    for program, state, text in itertools.chain.from_iterable(outcomes_of(pool, each) for each in by_mesh):
        states[state] += 1
        if state == "invalid":
            tell(f"invalid: {program.seed}: {text.strip().splitlines()[-1][:200]}")
        elif state != "equal":
            tell(f"{state}: {program}\n    {text}")
        if states.total() % 50 == 0:
            tell(f"{states.total()} programs: {dict(states)}")
    return states


def main(module: str) -> int:
    """The command of a module of programs."""
    programs = importlib.import_module(module)  # not as __main__, whose values the ranks cannot load
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=programs.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    pool = Pool(4)
    try:
        states = campaign(pool, [programs.program_of(args.seed + each) for each in range(args.count)])
    finally:
        pool.end()
    print(dict(states))
    return 0 if states.keys() <= {"equal", "refused", "invalid"} else 1
