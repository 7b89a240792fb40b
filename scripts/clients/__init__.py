"""Clients of other projects against `mtad serve`, each in an environment of its own."""
