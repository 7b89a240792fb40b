"""The device form of what a GPU captures: batched, over the whole vocabulary, without a look at the host.

`mtad.block` is the definition; tests compare the two row by row. Nodes are laid out alike for all rows of a batch: slot
`s` of level `l` is node `l * W + s`, W being the width of the widest draft. What a narrower row lacks is dead.
"""
