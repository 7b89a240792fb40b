"""Running generated SQL and code, and judging the result."""
