"""Programs that measure gradcast; from the root of the tree: ``python -m benchmarks.demo``."""
