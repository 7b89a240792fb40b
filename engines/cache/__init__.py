"""Keys and values of an engine's rows: `base` is the contract, `columns` and `paged` are the two kinds."""
