"""Decoding methods side by side on one set of prompts: how much faster, and at what price in quality."""
