"""What each client must get, as a program of its own that runs in the client's environment."""
