"""Blocks captured as CUDA graphs."""
