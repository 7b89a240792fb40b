"""Thousands of mixed requests through `AsyncLLM`, with integrity checks."""
