"""Requests, the queue and the KV rows. Nothing here imports torch."""
