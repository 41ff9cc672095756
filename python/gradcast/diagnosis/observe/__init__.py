"""Times and records the ordinary steps of a training."""
