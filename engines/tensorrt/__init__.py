"""Engines on TensorRT and TensorRT-RTX."""
