"""Options of every command that opens a pair: where it runs, and how."""

from __future__ import annotations

import argparse
from typing import Any


def add_placement(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--threads`, `--device`, `--no-graphs`, `--provider` and `--attention`."""
    parser.add_argument("--threads", type=int, help="CPU threads of the target (default: all cores)")
    parser.add_argument("--device", default="cpu", help="where both engines run: cpu, cuda, cuda:1 (%(default)s)")
    parser.add_argument("--no-graphs", action="store_true", help="on a GPU: record no CUDA graphs")
    parser.add_argument("--provider", help="of ONNX Runtime: cpu or cuda (default: by the device)")
    parser.add_argument("--attention", help="of torch engines: sdpa, or triton on a GPU (default: by the device)")


def placement_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was given, as arguments of `runtime.LLM`."""
    given = {name: getattr(options, name) for name in ("threads", "device", "provider", "attention")}
    return {**given, "graphs": not options.no_graphs}
