"""Plans of TensorRT-LLM 1.2, stepped by our loop. Not executed: no machine with the library was at hand."""
