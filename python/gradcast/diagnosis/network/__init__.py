"""Measures the network between the hosts and names what limits it. ``check.check`` is the entry point."""
