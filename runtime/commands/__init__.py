"""The command-line tools that open a pair, and the parser all commands share."""
