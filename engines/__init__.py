"""One step of one model: tokens in, logits out, a KV cache inside. Knows models and hardware, not decoding methods."""

import mtad  # noqa: F401 - switches telemetry off, before a library that has some is imported
