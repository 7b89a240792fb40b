"""An OpenAI-compatible HTTP server over `AsyncLLM`, for `mtad serve`, with the extra `serve`."""
