"""Why is a training as slow as it is, and what would help? (docs/doctor.md)

``doctor`` brings a diagnosis together; ``observer`` watches ordinary steps; ``probes`` and ``trial`` make others;
``stalls``, ``actions`` and ``verdict`` say what the numbers mean. Modules that need torch are imported when asked for.
"""
