"""Building TensorRT-LLM's plans, and writing the configuration of its worker."""
