"""A server under attack, and its other clients."""
