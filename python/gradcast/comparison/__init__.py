"""Policies and stock DDP side by side on one profile, and what the result means. Pure."""
