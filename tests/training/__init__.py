"""Tests of training with gradcast: real processes, Gloo, PyTorch. A package, so that its helpers are found by name."""
