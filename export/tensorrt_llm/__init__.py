"""Planning and building the engines of TensorRT-LLM executors."""
