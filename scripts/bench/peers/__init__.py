"""This package against other libraries that run the same checkpoints on a CPU; `python -m scripts.bench peers`."""
