"""CUDA graphs: what may be captured, and the runner that records and replays steps."""
