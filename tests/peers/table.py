"""Writes docs/evaluation/peers.md from the results of a run: python -m peers.table FILE... > docs/evaluation/peers.md

Of a test that is in several files the last result counts.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

HEAD = """# Other projects' tests of DDP

`make test-peers`, a part of `make test-all`, runs tests that others wrote for DDP, with gradcast attached to every DDP
module that they make. This page is made from its results:
`python -m peers.table build/pytest-peers.xml > docs/evaluation/peers.md`, with `tests` in `PYTHONPATH`.

* **PyTorch**: the tests of DDP in `torch.testing._internal.distributed.distributed_test`, of the torch that is
  installed. All ranks are on the CPU, over Gloo: what a test puts on a GPU stays on the CPU. Each runs with DDP alone
  first. What passes so has to pass with gradcast.
* **Accelerate**: the programs in `accelerate.test_utils.scripts`, on two ranks.
* **hook** is `gradcast.attach(ddp)`. **overlap** is `gradcast.attach(ddp, optimizer)`, where the test makes an
  optimizer of exactly the module's parameters; `-` where it makes none.
* "In part": a module that gradcast refuses, or that is detached, stays DDP's.
* Not in the wheel, so not run: PyTorch's `test/distributed/test_c10d_gloo.py`. Seven tests in `distributed_test.py` are
  text inside of a string, so torch does not run them either: `test_ddp_hook_with_optimizer_parity_*` and
  `test_ddp_update_process_group_*`.
"""


def word(found: dict[str, str], case: ElementTree.Element, mode: str) -> str:
    if mode == "overlap" and "hook only" in found:
        return "refused"
    if mode not in found:
        return "-"
    failed = case.find("failure") is not None or case.find("error") is not None
    # The last mode that was run is the one that failed.
    return (
        "**fails**" if failed and mode == [each for each in found if each in ("hook", "overlap")][-1] else found[mode]
    )


def rows(paths: list[str]) -> tuple[list[str], list[str], Counter, Counter]:
    """Lines of the tables of PyTorch and of Accelerate, and how often each mode and each reason occurs."""
    pytorch, modes, reasons = [], Counter(), Counter()
    programs: dict[str, dict[str, str]] = {}
    cases = {each.get("name"): each for path in paths for each in ElementTree.parse(path).iter("testcase")}
    for case in cases.values():
        name = case.get("name", "").partition("[")[2].rstrip("]")
        found = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        skipped = case.find("skipped")
        if not name:
            continue
        if "test_accelerate_scripts" in case.get("classname", ""):
            mode, _, program = name.rpartition("-")
            if skipped is not None:
                programs[name] = {"reason": skipped.get("message", "").removeprefix("not applicable: ")}
            else:
                failed = case.find("failure") is not None or case.find("error") is not None
                programs.setdefault(program, {})[mode] = "**fails**" if failed else "passed"
            continue
        if skipped is not None:
            reason = found.get("reason", "")
            reasons[reason.partition(":")[0]] += 1
            pytorch.append(f"| {name} | | | not applicable: {reason} |")
            continue
        words = [word(found, case, mode) for mode in ("hook", "overlap")]
        modes.update(mode for mode, each in zip(("hook", "overlap"), words, strict=True) if each == "passed")
        notes = [f"in part: {found['part']}"] if "part" in found else []
        notes += [f"overlap {found['hook only']}"] if "hook only" in found else []
        pytorch.append(f"| {name} | {' | '.join(words)} | {'; '.join(notes)} |")
    accelerate = [
        f"| {name} | {found.get('hook', '')} | {found.get('overlap', '')} | "
        + (f"not applicable: {found['reason']} |" if "reason" in found else "|")
        for name, found in programs.items()
    ]
    return pytorch, accelerate, modes, reasons


def main(paths: list[str]) -> None:
    pytorch, accelerate, modes, reasons = rows(paths)
    print(HEAD)
    print(f"## PyTorch\n\n{len(pytorch)} tests: {modes['hook']} pass in hook mode, {modes['overlap']} in overlap mode.")
    print(f"Not applicable: {sum(reasons.values())}.\n\n| reason | tests |\n|---|---|")
    print("\n".join(f"| {why} | {number} |" for why, number in reasons.most_common()))
    print("\n| test | hook | overlap | |\n|---|---|---|---|")
    print("\n".join(sorted(pytorch)))
    print("\n## Accelerate\n\n| program | hook | overlap | |\n|---|---|---|---|")
    print("\n".join(sorted(accelerate)))


if __name__ == "__main__":
    main(sys.argv[1:])
