"""`python -m runtime.triton` is `mtad-triton`."""

from runtime.triton.command import main

main()
