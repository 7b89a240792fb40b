"""Checkpoints from the hub on a GPU: speed and right answers beside other servers."""
