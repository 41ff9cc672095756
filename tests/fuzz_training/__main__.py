"""Runs random training programs and prints what was found."""

import argparse
import sys

from fuzz_training import generate
from fuzz_training.campaign import campaign, programs
from training.pool import Pool


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz_training",
        description="Runs random training programs with DDP and with gradcast, and prints where they differ.",
        epilog="example: python -m fuzz_training --seed 0 --count 1000",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--feature", action="append", default=[], help="one that every program shall have")
    parser.add_argument("--print", action="store_true", help="print the programs as code and run nothing")
    parser.add_argument("--whole", action="store_true", help="do not look for the smallest program that fails")
    args = parser.parse_args()
    if args.print:
        for seed in range(args.seed, args.seed + args.count):
            print(generate.program(seed, args.feature).source())
        return 0
    pool = Pool(3)
    try:
        found = campaign(
            pool,
            programs(args.seed, args.count, args.feature),
            shrinks=not args.whole,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    finally:
        pool.end()
    for program, outcome in found.failures:
        print(f"# {'-' * 70}\n# program {program.seed}: {program}\n# {outcome.text[:1500]!r}\n{program.body()}\n")
    print(found.table())
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
