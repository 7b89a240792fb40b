"""TensorRT-LLM: our acceptance in the one-model worker of its release 1.4.

Not executed: no machine with the library was at hand. Every call rests on the library's sources, which
docs/tensorrt-llm.md names, and is tested on fakes that behave as those sources say.
"""
