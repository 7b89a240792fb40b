"""Benchmarks on the demo pair."""
