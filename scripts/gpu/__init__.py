"""Checks and times everything on a GPU in one go; see `scripts/gpu/__main__.py`."""
