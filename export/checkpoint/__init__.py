"""Reading checkpoints: configuration, weights and vocabulary."""
