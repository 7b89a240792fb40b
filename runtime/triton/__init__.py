"""A model of Triton Inference Server (Python backend) over `AsyncLLM`: `mtad triton` writes its directory.

Needs the extra `triton`. `model.py` runs inside Triton, the rest also without it.
"""
