"""Requests to tokens: the decoding loop over two engines."""

import mtad  # noqa: F401 - switches telemetry off, before a library that has some is imported
