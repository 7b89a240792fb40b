"""Random numbers of a block, by each request's own generator: made on the host, or on the device itself."""
