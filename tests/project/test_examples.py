"""The examples train, and every way of sending the gradients gives the same losses."""

import re
import tempfile

import pytest

from conftest import ROOT
from gradcast.lab import run_workers

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

WAIT_S = 120
NEEDED = {
    "digits.py": ["sklearn"],
    "char_gpt.py": [],
    "lightning_digits.py": ["sklearn", "lightning"],
    "trainer_gpt.py": ["transformers", "accelerate"],
}


def printed(worker_count, *arguments) -> list[str]:
    """The lines of rank 0, without how long a step took."""
    with tempfile.TemporaryFile("w+") as output:
        script = str(ROOT / "examples" / arguments[0])
        run_workers([script, *arguments[1:]], worker_count, timeout_s=WAIT_S, output=output)
        output.seek(0)
        return [re.sub(r", [\d.]+ ms per step", "", line) for line in output.read().splitlines()]


@pytest.mark.parametrize(
    ("script", "length", "modes"),
    [
        ("digits.py", ["--epochs", "2"], ["hook", "overlap"]),
        ("char_gpt.py", ["--steps", "20", "--batch", "2"], ["overlap"]),
        ("lightning_digits.py", ["--epochs", "2"], ["overlap"]),
        ("trainer_gpt.py", ["--steps", "20", "--batch", "2", "--clip", "0.5"], ["overlap"]),
        pytest.param("lightning_digits.py", ["--epochs", "2"], ["hook"], marks=pytest.mark.long),
        pytest.param("trainer_gpt.py", ["--steps", "20", "--batch", "2"], ["hook", "overlap"], marks=pytest.mark.long),
    ],
)
def test_all_ways_of_training_give_the_same_losses(script, length, modes):
    for package in NEEDED[script]:
        pytest.importorskip(package)
    stock = printed(2, script, "--gradcast", "off", *length)
    assert stock
    assert all("loss" in line for line in stock)
    for mode in modes:
        assert printed(2, script, "--gradcast", mode, *length) == stock


@pytest.mark.parametrize(
    ("script", "length"),
    [
        ("digits.py", ["--epochs", "1"]),
        pytest.param("lightning_digits.py", ["--epochs", "1"], marks=pytest.mark.long),
        pytest.param("trainer_gpt.py", ["--steps", "20", "--batch", "2", "--clip", "0.5"], marks=pytest.mark.long),
    ],
)
def test_one_process_is_enough(script, length):
    for package in NEEDED[script]:
        pytest.importorskip(package)
    assert len(printed(1, script, "--gradcast", "overlap", *length)) == 1
