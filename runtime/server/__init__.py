"""An OpenAI-compatible HTTP server over `runtime.AsyncLLM`: `mtad-serve`.

Needs the extra `serve` (FastAPI, uvicorn, prometheus-client).
"""
