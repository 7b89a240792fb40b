"""`mtad export`: two Hugging Face checkpoints to a pair folder."""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command

if TYPE_CHECKING:
    from export.plan import ExportOptions


@command
def main() -> None:
    """Entry point of `mtad export`."""
    parser = Parser(
        prog="mtad export",
        usage="%(prog)s PAIR --target CHECKPOINT --auxiliary CHECKPOINT [options]",
        description="Compile a target and an auxiliary model into a pair of engines. The two vocabularies are compared "
        "first, and each engine's logits with its checkpoint's; if either check fails, nothing is left behind.",
    )
    parser.add_argument("pair", type=Path, help="folder to write")
    parser.add_argument("--target", required=True, help="checkpoint of the target: local folder or hub id")
    parser.add_argument("--auxiliary", required=True, help="checkpoint of the auxiliary, same vocabulary")
    parser.add_argument("--revision", help="branch, tag or commit of a target on the hub")
    parser.add_argument("--auxiliary-revision", help="branch, tag or commit of an auxiliary on the hub")
    parser.add_argument("--rows", type=int, default=8, help="requests at once (default %(default)s)")
    parser.add_argument(
        "--capacity", type=int, help="KV columns per row, a multiple of 64 (default: 1024, or what the models allow)"
    )
    parser.add_argument(
        "--precision",
        help="of the target: float32, float16, bfloat16, int8 or int4 (weights alone), int8-dynamic; int8-static and "
        "fp8 for TensorRT (default: float32; float16 for TensorRT and TensorRT-LLM)",
    )
    parser.add_argument("--auxiliary-precision", help="of the auxiliary (default: the target's)")
    parser.add_argument(
        "--calibration",
        help="text to measure a quantized pair on: JSON lines with prompt and optionally answer; for tensorrt-llm, a "
        "calibration data set: local folder or hub id",
    )
    parser.add_argument(
        "--to",
        default="onnx",
        help="onnx (ONNX Runtime), torch (reference), tensorrt, tensorrt-rtx or tensorrt-llm (default %(default)s)",
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
        help="GPUs that a tensorrt-rtx plan is for, such as 8.6 8.9 12.0 (default: all supported)",
    )
    parser.add_argument("--defaults", default="{}", help="decoding parameters for pair.json, as a JSON object")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder that differs")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the input and estimate disk, memory and time; write nothing"
    )
    group = parser.add_argument_group("TensorRT-LLM", "only for --to tensorrt-llm; see docs/tensorrt-llm.md")
    group.add_argument("--draft-len", type=int, default=8, help="longest draft (default %(default)s)")
    group.add_argument("--beam-width", type=int, default=4, help="widest draft (default %(default)s)")
    group.add_argument("--drafting", default="search", help="search, samples or steps (default %(default)s)")
    group.add_argument("--tensor-parallel", type=int, default=1, help="GPUs per engine (default %(default)s)")
    group.add_argument("--quantize", default="none", help="quantization of the target: none, fp8 or int4_awq")
    group.add_argument(
        "--max-num-tokens", type=int, help="tokens per iteration (default: what prompts and drafts need)"
    )
    group.add_argument("--plan", action="store_true", help="print what would be built, as JSON, and build nothing")
    options = parser.parse_args()
    try:
        defaults = json.loads(options.defaults)
        if not isinstance(defaults, dict):
            raise ValueError
    except ValueError:
        raise InvalidInput("defaults", options.defaults, "give a JSON object of decoding parameters") from None
    executor_only = ("draft_len", "beam_width", "drafting", "tensor_parallel", "quantize", "max_num_tokens", "plan")
    executor, ours = options.to == "tensorrt-llm", ("attention", "compute_capability", "auxiliary_precision")
    for name in ours if executor else executor_only:
        if getattr(options, name) != parser.get_default(name):
            problem = f"{'not an' if executor else 'an'} option of --to tensorrt-llm; leave it out"
            raise InvalidInput(name, getattr(options, name), problem)

    from engines.pytorch.hook import quiet_transformers

    quiet_transformers()
    if executor:
        _tensorrt_llm(options, defaults)
        return

    from tqdm import tqdm

    from engines.memory import format_bytes
    from export.pair import export_pair
    from export.plan import ExportOptions

    asked = ExportOptions(
        options.target,
        options.auxiliary,
        revision=options.revision,
        auxiliary_revision=options.auxiliary_revision,
        rows=options.rows,
        capacity=options.capacity,
        precision=options.precision,
        auxiliary_precision=options.auxiliary_precision,
        calibration=options.calibration and Path(options.calibration),
        format=options.to,
        attention=options.attention,
        compute_capabilities=options.compute_capability,
        defaults=defaults,
    )
    if options.dry_run:
        print(_dry_run(options.pair.absolute(), asked, options.overwrite))
        return

    stages = itertools.count()
    form = "{desc:<28} {bar:24} {n}/{total} [{elapsed}]"
    # shown on terminals only, and taken away again if the export fails: an error is one line
    quantized = options.calibration is not None
    with tqdm(
        total=(12 if quantized else 7) if options.to.startswith("tensorrt") else 10 if quantized else 5,
        desc="export",
        bar_format=form,
        file=sys.stderr,
        disable=None,
        leave=False,
    ) as bar:

        def progress(stage: str) -> None:
            number = next(stages)
            bar.update(number > 0)
            bar.set_description_str(stage)
            if number and not sys.stderr.isatty():
                print(f"export: {stage}", file=sys.stderr, flush=True)

        began = time.monotonic()
        written = export_pair(options.pair, asked, options.overwrite, progress)
        bar.n, bar.leave = bar.total, True
        bar.set_description_str("done" if written else "up to date")
    if written:
        size = sum(file.stat().st_size for file in options.pair.rglob("*") if file.is_file())
        print(f"wrote {format_bytes(size)} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        print(f"next: mtad generate {options.pair} '...', or mtad serve {options.pair}", file=sys.stderr)
    print(options.pair)


def _dry_run(folder: Path, asked: ExportOptions, overwrite: bool) -> str:
    """What the export would take, all of its input checked; weights are not downloaded."""
    from export.estimate import describe, estimate_pair
    from export.pair import check_folder
    from export.plan import plan_pair

    plan = plan_pair(asked, weights=False)
    if not check_folder(folder, plan, overwrite or any(model.download for model, _, _ in plan.engines)):
        return "up to date; nothing to write"
    return describe(estimate_pair(folder, plan))


def _tensorrt_llm(options: Namespace, defaults: dict[str, object]) -> None:
    """Plan the engines, print the plan, and build them unless the plan is all that was asked for."""
    from export.tensorrt_llm.build import build_pair, plan_pair

    plan = plan_pair(
        options.target,
        options.auxiliary,
        rows=options.rows,
        capacity=options.capacity or 1024,
        precision=options.precision or "float16",
        draft_len=options.draft_len,
        beam_width=options.beam_width,
        drafting=options.drafting,
        tensor_parallel=options.tensor_parallel,
        quantization=options.quantize,
        calibration=options.calibration,
        max_num_tokens=options.max_num_tokens,
        defaults=defaults,
        weights=not (options.plan or options.dry_run),
    )
    print(plan, file=sys.stderr)
    if options.plan:
        print(json.dumps(plan.to_dict()))
    if options.plan or options.dry_run:
        return
    build_pair(plan, options.pair, options.overwrite)
    print(options.pair)
