"""Building TensorRT-LLM engines."""
