"""A model of Triton Inference Server over `AsyncLLM`, for `mtad triton`, with the extra `triton`."""
