"""What hosts run of the project: the same commands as everybody's, for the versions that the documentation names.

`make lint` runs actionlint on the workflows where it is at hand.
"""

import re

from tree import files_in

from conftest import ROOT

WORKFLOWS = {path.name: path.read_text() for path in files_in(".github/workflows", ".yml")}
MAKEFILE = (ROOT / "Makefile").read_text()


def versions(pattern: str, text: str) -> list[str]:
    return re.findall(r"\d\.\d+", re.search(pattern, text)[1])


def test_workflows_run_targets_of_the_makefile():
    texts = [*WORKFLOWS.values(), (ROOT / ".pre-commit-config.yaml").read_text()]
    called = {target for text in texts for target in re.findall(r"(?:run|entry): make ([\w-]+)", text)}
    assert called == {"docs", "lint", "test", "test-all", "wheels-portable"}
    assert called <= set(re.findall(r"^\.PHONY: ([\w-]+)$", MAKEFILE, re.MULTILINE))


def test_every_python_is_tested_and_has_a_wheel():
    tested = versions(r" python: (\[.*\])", WORKFLOWS["ci.yml"])
    assert tested == versions(r"PYTHONS \?= (.*)", MAKEFILE)
    project = (ROOT / "pyproject.toml").read_text()
    built = re.search(r'^build = "(.*)"', project, re.MULTILINE)[1].split()
    assert built == [f"cp{version.replace('.', '')}-*" for version in tested]
    assert [tested[0]] == versions(r'requires-python = ">=(.*)"', project)


def test_the_oldest_and_the_newest_torch_are_tested():
    oldest, newest = versions(r"(PyTorch 2\.\d+ to 2\.\d+)", (ROOT / "README.md").read_text())
    assert versions(r'"(torch==.*)"', (ROOT / "pyproject.toml").read_text()) == [oldest]
    assert versions(r' torch: \["", (.*)\]', WORKFLOWS["ci.yml"]) == [newest]


def test_actions_are_pinned():
    used = [each for text in WORKFLOWS.values() for each in re.findall(r"uses: (.*)", text)]
    assert used
    assert not [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)]
