"""`mtad-export`: two Hugging Face checkpoints to a pair folder."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from mtad.errors import InvalidInput, Parser, command


@command
def main() -> None:
    """Entry point of `mtad-export`."""
    parser = Parser(prog="mtad-export", description=__doc__)
    parser.add_argument("pair", type=Path, help="folder to write")
    parser.add_argument("--target", required=True, help="checkpoint of the target: local folder or hub id")
    parser.add_argument("--auxiliary", required=True, help="checkpoint of the auxiliary, same vocabulary")
    parser.add_argument("--rows", type=int, default=8, help="requests at once (default %(default)s)")
    parser.add_argument(
        "--capacity", type=int, default=1024, help="KV columns a row, a multiple of 64 (default %(default)s)"
    )
    parser.add_argument(
        "--precision",
        default="float32",
        help="of the target: float32, float16, int8 or int4 (weights alone), int8-dynamic (default %(default)s)",
    )
    parser.add_argument("--auxiliary-precision", help="of the auxiliary (default: the target's)")
    parser.add_argument(
        "--calibration",
        type=Path,
        help="text to measure a quantised pair on: JSON lines with prompt and perhaps answer",
    )
    parser.add_argument("--to", default="onnx", help="onnx (ONNX Runtime) or torch (reference) (default %(default)s)")
    parser.add_argument("--defaults", default="{}", help="decoding parameters for pair.json, as a JSON object")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder that differs")
    options = parser.parse_args()
    try:
        defaults = json.loads(options.defaults)
        if not isinstance(defaults, dict):
            raise ValueError
    except ValueError:
        raise InvalidInput("defaults", options.defaults, "give a JSON object of decoding parameters") from None

    from tqdm import tqdm

    from engines.hook import quiet_transformers
    from export.pair import export_pair

    quiet_transformers()

    stages = itertools.count()
    form = "{desc:<28} {bar:24} {n}/{total} [{elapsed}]"
    # shown on terminals only, and taken away again if the export fails: an error is one line
    quantized = options.calibration is not None
    with tqdm(
        total=10 if quantized else 5, desc="export", bar_format=form, file=sys.stderr, disable=None, leave=False
    ) as bar:

        def progress(stage: str) -> None:
            bar.update(next(stages) > 0)
            bar.set_description_str(stage)

        written = export_pair(
            options.pair,
            options.target,
            options.auxiliary,
            rows=options.rows,
            capacity=options.capacity,
            precision=options.precision,
            auxiliary_precision=options.auxiliary_precision,
            calibration=options.calibration,
            format=options.to,
            defaults=defaults,
            overwrite=options.overwrite,
            progress=progress,
        )
        bar.n, bar.leave = bar.total, True
        bar.set_description_str("done" if written else "up to date")
    print(options.pair)
