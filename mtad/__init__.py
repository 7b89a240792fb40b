"""The mathematics of multi-token assisted decoding: pure tensor functions (arXiv 2407.09722).

Nothing here knows an engine, a file, a clock or a request. Every function has static shapes, does not synchronise with
the device, has no branch on data, and takes its noise as an argument.
"""

from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import METHODS, DecodingParams, Method

__all__ = ["METHODS", "CapacityExceeded", "DecodingParams", "InvalidInput", "Method"]
