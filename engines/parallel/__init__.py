"""Tensor parallelism: an engine whose target is sharded over ranks."""
