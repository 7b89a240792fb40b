"""`python -m runtime.server` is `mtad-serve`."""

from runtime.server.command import main

main()
