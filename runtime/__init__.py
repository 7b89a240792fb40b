"""Requests to tokens: the decoding loop over two engines."""

from mtad.params import DecodingParams
from runtime.llm import LLM
from runtime.request import Result

__all__ = ["LLM", "DecodingParams", "Result"]
