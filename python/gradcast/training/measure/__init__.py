"""Clocks: what compute and network cost in a step, and which stage keeps the group waiting."""
