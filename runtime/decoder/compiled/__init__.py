"""The functions of `mtad.block` compiled for ONNX Runtime."""
