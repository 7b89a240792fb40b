"""The command-line tools that export and check engines."""
