"""The stubs say what the compiled modules have: names, attributes and parameters."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT

pytest.importorskip("mypy", reason="this needs mypy, which `make` installs")

STUBS = {"gradcast._core": ROOT / "python/gradcast/_core.pyi", "_testing": ROOT / "tests/_testing.pyi"}
# What holds of every class of pybind11: `Final` says read-only, and a missing constructor raises. `Mode` and `Op` are
# names of types.
USUAL = re.compile(
    r"metaclass differs|is read-only at runtime but not in the stub|__pybind11_\w+ is not present in stub"
    r"|__init__ is inconsistent, stub does not have \*args|_core\.(Mode|Op) is not present at runtime"
)

DEFAULT_SHOWN = re.compile(r"<[^>]*>")  # as repr() shows a value that is no literal


def names_differ(folder: Path, module: str) -> list[str]:
    """Returns what stubtest finds wrong with the stub in this folder."""
    (folder / "mypy.ini").write_text("[mypy]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--mypy-config-file", folder / "mypy.ini", module]
    environment = os.environ | {"MYPYPATH": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests"), *sys.path])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if not USUAL.search(line) and not line.startswith("Found")]


def parameters_of(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.args, *given.kwonlyargs)] + ["*"] * bool(given.kwonlyargs)


def parameters_differ(stub: str, module: Any) -> Iterator[str]:
    """Yields the functions whose parameters are others in the signature that pybind11 writes into the docstring, which
    stubtest does not read."""

    def check(body: list[ast.stmt], owner: Any) -> Iterator[str]:
        for each in body:
            if isinstance(each, ast.ClassDef):
                yield from check(each.body, getattr(owner, each.name))
            elif isinstance(each, ast.FunctionDef) and not any("property" in ast.dump(d) for d in each.decorator_list):
                if not hasattr(owner, each.name):  # stubtest says so
                    continue
                signature = getattr(owner, each.name).__doc__.splitlines()[0]
                (built,) = ast.parse(f"def {DEFAULT_SHOWN.sub('None', signature)}: ...").body
                if parameters_of(built) != parameters_of(each):
                    yield f"{owner.__name__}.{each.name} has other parameters: {signature}"

    return check(ast.parse(stub).body, module)


def differences(folder: Path, module: str, stub: str) -> list[str]:
    path = folder.joinpath(*module.split(".")).with_suffix(".pyi")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent != folder:
        (path.parent / "__init__.pyi").touch()
    path.write_text(stub)
    return [*names_differ(folder, module), *parameters_differ(stub, importlib.import_module(module))]


@pytest.mark.parametrize("module", STUBS)
def test_a_stub_says_what_the_module_has(module, tmp_path):
    assert not differences(tmp_path, module, STUBS[module].read_text())


# By what is said of it: what is replaced in the stub, and by what.
MISTAKES = {
    "gradcast._core.nets is not present at runtime": ("def networks()", "def nets()"),
    "gradcast._core.networks is not present in stub": ("def networks()", "def nets()"),
    "gradcast._core.LinkPiece.beta_ns_per_byte is not present in stub": (
        "    beta_ns_per_byte: Final[float]",
        "    beta: Final[float]",
    ),
    "gradcast._core.play": ("play(profile: Profile, link:", "play(profile: Profile, network:"),
    "gradcast._core.bound": ("link: LinkModel, *, mode: str", "link: LinkModel, mode: str"),
}


def test_a_wrong_stub_is_found(tmp_path):
    stub = STUBS["gradcast._core"].read_text()
    for right, wrong in set(MISTAKES.values()):
        assert right in stub
        stub = stub.replace(right, wrong, 1)
    found = differences(tmp_path, "gradcast._core", stub)
    assert [said for said in MISTAKES if not any(line.startswith(said) for line in found)] == [], found
