"""CUDA graphs: what may be captured, and the runner that captures and replays TensorRT's steps."""
