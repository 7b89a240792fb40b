"""Decoding methods side by side on sets of prompts: quality, repetition, acceptance, speed, energy."""
