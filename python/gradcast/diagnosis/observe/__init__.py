"""Watches the ordinary steps of a training."""
