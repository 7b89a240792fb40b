"""Checkpoint to engine folder."""

import mtad  # noqa: F401 - switches telemetry off, before a library that has some is imported
