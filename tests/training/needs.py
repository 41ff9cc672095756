"""Importing torch from here skips the importing test module, with a sentence, where PyTorch is not installed."""

import pytest

torch = pytest.importorskip(
    "torch", reason="the training tests need PyTorch, which is not installed: pip install torch"
)
