"""The counts that `make test`, `make test-all` and .ci/run end with."""

import subprocess
import sys

import pytest

from conftest import ROOT

PASSED = '<testcase name="a"/>'
FAILED = '<testcase name="b"><failure message="no"/></testcase>'
FAILED_IN_GTEST = """<testcase name="e" classname="A"><failure message=""/><system-out>[ RUN      ] A.e
/src/x_test.cc:9: Failure
</system-out></testcase>"""
SKIPPED = '<testcase name="c"><skipped message="there is no GPU"/></testcase>'
SKIPPED_BY_GTEST = """<testcase name="d"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>[ RUN      ] A.B
/src/x_test.cc:7: Skipped
this needs MPI
</system-out></testcase>"""


@pytest.mark.parametrize(
    ("status", "cases", "code", "lines"),
    [
        (0, PASSED, 0, ["1 passed, 0 failed"]),
        (2, PASSED + FAILED, 1, ["failed: : b", "    no", "1 passed, 1 failed"]),
        (
            2,
            FAILED_IN_GTEST,
            1,
            ["failed: A: e", "    [ RUN      ] A.e", "    /src/x_test.cc:9: Failure", "0 passed, 1 failed"],
        ),
        (2, PASSED, 1, ["no test failed, but the build or the style check did: see above", "1 passed, 1 failed"]),
        (0, "", 1, ["0 passed, 0 failed"]),
        (0, PASSED + SKIPPED * 2, 0, ["skipped 2: there is no GPU", "1 passed, 0 failed, 2 skipped"]),
        (0, PASSED + SKIPPED_BY_GTEST, 0, ["skipped 1: this needs MPI", "1 passed, 0 failed, 1 skipped"]),
        (0, None, 1, ["0 passed, 1 failed"]),
    ],
)
def test_counts(tmp_path, status, cases, code, lines):
    path = tmp_path / "tests.xml"
    if cases is not None:
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    command = [sys.executable, str(ROOT / "tools/count_results.py"), str(status), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ended.stdout.splitlines()
    assert ended.returncode == code
    assert [line for line in said if not line.startswith("tests: ")] == lines
    assert said[-1] == lines[-1]
