"""`mtad export`: Hugging Face checkpoints to a pair folder."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path

from engines.kinds import EXTERNAL, FORMATS
from export.options import ExportOptions
from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, add_options, command, given_options, json_object
from runtime.commands.pair_source import print_stage
from runtime.commands.terminal import waiting

OPTION_FIELDS = ("revision", "auxiliary_revision", "rows", "capacity", "precision", "auxiliary_precision", "attention")
"""Fields of `ExportOptions` that are options of the command as they are."""


@command
def main() -> None:
    """Entry point of `mtad export`."""
    parser = Parser(
        prog="mtad export",
        usage="%(prog)s PAIR --target CHECKPOINT [--auxiliary CHECKPOINT] [options]",
        description="Compile a target and an auxiliary model into a pair of engines, or the target alone, for which "
        "drafts are looked up in the text. The two vocabularies are compared first, and each engine's logits with its "
        "checkpoint's; if either check fails, nothing is left behind.",
    )
    parser.add_argument("pair", type=Path, help="folder to write")
    parser.add_argument("--target", required=True, help="checkpoint of the target: local folder or hub id")
    parser.add_argument("--auxiliary", help="checkpoint of the auxiliary, same vocabulary")
    add_options(parser, ExportOptions, only=OPTION_FIELDS)
    parser.add_argument(
        "--calibration",
        type=Path,
        help="text to measure a quantized pair on: JSON lines with prompt and optionally answer; for tensorrt-llm, a "
        "calibration data set: local folder or hub id (default: not measured)",
    )
    parser.add_argument(
        "--to",
        dest="format",
        default=ExportOptions.format,
        help=f"{', '.join((*FORMATS, *EXTERNAL))} (default %(default)s)",
    )
    parser.add_argument(
        "--compute-capability",
        dest="compute_capabilities",
        nargs="+",
        default=(),
        metavar="M.N",
        help="GPUs that a tensorrt-rtx plan is for, such as 8.6 8.9 12.0 (default: all supported)",
    )
    parser.add_argument(
        "--defaults", type=json_object, default={}, help="decoding parameters, over what the target recommends, as JSON"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder that differs")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the input and estimate disk and memory; write nothing"
    )
    group = parser.add_argument_group("TensorRT-LLM", "only for --to tensorrt-llm; see docs/tensorrt-llm.md")
    group.add_argument("--draft-len", type=int, default=8, help="longest draft (default %(default)s)")
    group.add_argument("--beam-width", type=int, default=4, help="widest draft (default %(default)s)")
    group.add_argument("--drafting", default="search", help="search or steps (default %(default)s)")
    group.add_argument("--tensor-parallel", type=int, default=1, help="GPUs per engine (default %(default)s)")
    group.add_argument("--quantize", default="none", help="quantization of the target: none, fp8 or int4_awq")
    group.add_argument("--plan", action="store_true", help="print what would be built, as JSON, and build nothing")
    options = parser.parse_args()
    executor_only = ("draft_len", "beam_width", "drafting", "tensor_parallel", "quantize", "plan")
    executor, ours = options.format in EXTERNAL, ("attention", "compute_capabilities", "auxiliary_precision")
    for name in ours if executor else executor_only:
        default = getattr(ExportOptions, name, parser.get_default(name))
        if getattr(options, name, default) != default:
            problem = f"{'not an' if executor else 'an'} option of --to tensorrt-llm; leave it out"
            raise InvalidInput(name, getattr(options, name), problem)
    asked = ExportOptions(**given_options(options, ExportOptions))

    with waiting("loading PyTorch and transformers"):
        from engines.quiet import quiet_transformers

        quiet_transformers()
    if executor:
        _tensorrt_llm(options, asked)
        return

    with waiting("loading PyTorch and transformers"):
        from engines.folder import read_json
        from engines.memory import format_bytes
        from export.pair import export_pair
        from runtime.pair import store_costs
        from runtime.tuning.efficiency import block_efficiency

    if options.dry_run:
        print(_dry_run(options.pair.absolute(), asked, options.overwrite))
        return

    began = time.monotonic()
    written = export_pair(options.pair, asked, options.overwrite, print_stage, block_efficiency)
    if FORMATS[asked.format].stored != "plan" and "costs" not in read_json(options.pair, "pair.json"):
        print_stage("100 %, measuring what drafts cost")
        try:
            store_costs(options.pair)
        except (InvalidInput, OSError) as error:  # it does not run here, or its folder cannot be written
            print(f"what drafts cost was not measured: {error}", file=sys.stderr)
    if written:
        size = sum(file.stat().st_size for file in options.pair.rglob("*") if file.is_file())
        print(f"wrote {format_bytes(size)} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        if asked.measured and asked.calibration is None:
            print("quantization.json: measured on bundled texts; --calibration FILE takes yours", file=sys.stderr)
        where = ", where its GPU is" if FORMATS[asked.format].stored == "plan" else ""
        print(f"next{where}: mtad generate {options.pair} '...', or mtad serve {options.pair}", file=sys.stderr)
    else:
        print("up to date; nothing was written", file=sys.stderr)
    print(options.pair)


def _dry_run(folder: Path, asked: ExportOptions, overwrite: bool) -> str:
    """What the export would take, all of its input checked; weights are not downloaded."""
    from export.estimate import describe, estimate_pair
    from export.pair import check_folder
    from export.plan import plan_pair

    plan = plan_pair(asked, weights=False)
    if not check_folder(folder, plan, overwrite or any(model.download for model, _, _ in plan.engines)):
        return "up to date; nothing to write"
    return describe(folder, *estimate_pair(folder, plan))


def _tensorrt_llm(options: Namespace, asked: ExportOptions) -> None:
    from export.tensorrt_llm.build import build_pair, plan_pair

    sizes = {name: getattr(options, name) for name in ("draft_len", "beam_width", "drafting", "tensor_parallel")}
    weights = not (options.plan or options.dry_run)
    plan = plan_pair(asked, **sizes, quantization=options.quantize, weights=weights)
    print(plan, file=sys.stderr)
    if options.plan:
        print(json.dumps(plan.to_dict()))
    if options.plan or options.dry_run:
        return
    build_pair(plan, options.pair, options.overwrite)
    print("these engines are built, and this version does not run them: docs/tensorrt-llm.md", file=sys.stderr)
    print(options.pair)
