"""Runs extra steps that isolate one cost each, and restores the training's state afterwards."""
