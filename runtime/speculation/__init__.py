"""How much to draft: measured step costs and observed acceptance."""
