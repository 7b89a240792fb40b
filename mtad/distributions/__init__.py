"""Next-token distributions: short ones as a sorted list of candidates, long ones as a table of the vocabulary."""
