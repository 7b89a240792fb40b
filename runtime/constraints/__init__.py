"""Constrained decoding: penalties, biases, grammars and schemas as masks over the vocabulary."""
