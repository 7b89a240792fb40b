"""An OpenAI-compatible HTTP server over `runtime.AsyncLLM`: `mtad serve`.

Needs the extra `serve` (Starlette, uvicorn, prometheus-client).
"""
