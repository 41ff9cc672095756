"""Measures a training: when gradients are ready, what compute and the network cost, which stage delays the group."""
