"""Turns measurements into the diagnosis: where time goes, what would help, what is misconfigured. Needs no torch."""
