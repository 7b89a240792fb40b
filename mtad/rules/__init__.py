"""Acceptance rules: which drafted tokens are kept, and what the target's own token is drawn from.

A rule is a function of one row: `rule(row, scored, bonus) -> node`. It returns the deepest node that is kept, -1 for
none, and writes the distribution of the bonus token to `bonus` (`mtad.rules.scored`).
"""
