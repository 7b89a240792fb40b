"""TensorRT-LLM: the two roles over its executors, and drafting and acceptance for its PyTorch backend.

Not executed: no machine with the library was at hand. Written for the interfaces of 1.2.0 and 1.2.1, which the tests'
fake repeats; see docs/tensorrt-llm.md.
"""
