"""Comparing an engine with its checkpoint."""
