"""Callbacks that call ``gradcast.attach`` at the right moment. Each module needs its framework: import only one."""
