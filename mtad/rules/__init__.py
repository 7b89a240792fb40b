"""Which drafted tokens are kept: one module per family of rules, and `accept`, which applies each row's own."""
