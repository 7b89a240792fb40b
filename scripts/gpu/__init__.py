"""Checks and times everything on a GPU in one go; see `scripts/gpu_check.py`."""
