"""Engines on ONNX Runtime."""
