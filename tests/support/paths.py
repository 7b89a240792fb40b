"""Where the files of a checkout lie that tests use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAIR = ROOT / "scripts" / "demo" / "pair"
"""The checkpoints of the demo pair."""
