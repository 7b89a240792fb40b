"""Checkpoint to ONNX graph, and the decoding functions compiled to ONNX graphs."""
