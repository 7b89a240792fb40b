"""How much to draft: observed acceptance and block times."""
