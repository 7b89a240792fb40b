"""Weight-only and static quantization of ONNX graphs, and the report of what it costs."""
