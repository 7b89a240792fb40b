"""An OpenAI-compatible HTTP server over `AsyncLLM`: `mtad serve`.

Needs the extra `serve` (Starlette, uvicorn, prometheus-client).
"""
