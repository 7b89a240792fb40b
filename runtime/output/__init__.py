"""From tokens to text, stop conditions and streams."""
