"""Checkpoint to ONNX graph."""
