"""Compares the plans of policies and the DDP baseline on one profile. Pure."""
