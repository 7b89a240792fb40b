"""Drafts: the token tree, how its levels are drawn, and the beams that stay alive from block to block."""
