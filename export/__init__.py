"""Checkpoint to engine folder."""
