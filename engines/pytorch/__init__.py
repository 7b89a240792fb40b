"""Engines on PyTorch: a Hugging Face model with our KV cache and attention."""
