"""`mtad-export`: two Hugging Face checkpoints to a pair folder."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
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
    parser.add_argument("--dtype", default="float32", help="float32 or float16 (default %(default)s)")
    parser.add_argument(
        "--to",
        default="onnx",
        help="onnx (ONNX Runtime), torch (reference), tensorrt (this GPU) or tensorrt-rtx (default %(default)s)",
    )
    parser.add_argument(
        "--attention",
        default="operator",
        help="operator, or decomposed: for runtimes without the operators of opset 24 (default %(default)s)",
    )
    parser.add_argument(
        "--compute-capability",
        nargs="+",
        default=[],
        metavar="M.N",
        help="GPUs that a tensorrt-rtx plan is for, such as 8.6 8.9 12.0 (default: all it knows)",
    )
    parser.add_argument("--defaults", default="{}", help="decoding parameters for pair.json, as a JSON object")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder that differs")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the input, print disk, memory and time to expect; write nothing"
    )
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
    if options.dry_run:
        print(_dry_run(options, defaults))
        return

    stages = itertools.count()
    form = "{desc:<28} {bar:24} {n}/{total} [{elapsed}]"
    # shown on terminals only, and taken away again if the export fails: an error is one line
    with tqdm(
        total=7 if options.to.startswith("tensorrt") else 5,
        desc="export",
        bar_format=form,
        file=sys.stderr,
        disable=None,
        leave=False,
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
            dtype=options.dtype,
            format=options.to,
            attention=options.attention,
            compute_capabilities=options.compute_capability,
            defaults=defaults,
            overwrite=options.overwrite,
            progress=progress,
        )
        bar.n, bar.leave = bar.total, True
        bar.set_description_str("done" if written else "up to date")
    print(options.pair)


def _dry_run(options: Namespace, defaults: dict[str, object]) -> str:
    """What the export would take, all of its input checked; weights are not downloaded."""
    from export.estimate import describe, estimate_pair
    from export.pair import check_folder, plan_pair

    folder = options.pair.absolute()
    size = {"rows": options.rows, "capacity": options.capacity, "dtype": options.dtype, "format": options.to}
    plan = plan_pair(
        options.target,
        options.auxiliary,
        **size,
        defaults=defaults,
        weights=False,
        attention=options.attention,
        compute_capabilities=options.compute_capability,
    )
    if not check_folder(folder, plan, options.overwrite or any(model.download for model, _, _ in plan.engines)):
        return "up to date; nothing to write"
    return describe(estimate_pair(folder, plan))
