"""Where the files of a checkout lie that scripts and tests use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "scripts" / "demo"
"""The demo: its two pairs of checkpoints, its data, and the values tuned for it."""
RESULTS = ROOT / "docs" / "results"
"""Published measurements."""
