"""TensorRT-LLM: the two roles over its executors (1.2), and our acceptance in its one-model worker (1.4).

Not executed: no machine with the library was at hand. Every call rests on the library's sources, which
docs/tensorrt-llm.md names, and is tested on fakes that behave as those sources say.
"""
