"""Callbacks that call ``gradcast.attach`` at the right moment of a framework's training.

Each module needs its framework, which is not a dependency of gradcast, so import only the one that you use.
"""
