"""Choosing decoding parameters for a pair from measurements."""
