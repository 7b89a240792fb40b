"""`mtad export`: Hugging Face checkpoints to a pair folder."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from engines.kinds import FORMATS
from export.options import ExportOptions
from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, add_options, command, given_options, json_object
from runtime.commands.pair_source import EXPORT_OPTIONS, print_stage
from runtime.commands.terminal import waiting

OPTION_FIELDS = ("rows", *EXPORT_OPTIONS, "auxiliary_precision", "calibration", "attention")
"""Fields of `ExportOptions` that are options of the command as they are."""
WORKER = "tensorrt-llm-worker"
"""In the place of a format: no engines are made, but what TensorRT-LLM's own worker is started with."""


@command
def main() -> None:
    """Entry point of `mtad export`."""
    about = """Compile a target and an auxiliary model into a pair of engines, or the target alone, for which drafts are
    looked up in the text. The two vocabularies are compared first, and each engine's logits with its checkpoint's; if
    either check fails, nothing is left behind."""
    usage = "%(prog)s PAIR --target CHECKPOINT [--auxiliary CHECKPOINT] [options]"
    parser = Parser(prog="mtad export", usage=usage, description=about)
    parser.add_argument("pair", type=Path, help="folder to write")
    parser.add_argument("--target", required=True, help="checkpoint of the target: local folder, hub id or GGUF file")
    parser.add_argument("--auxiliary", help="checkpoint of the auxiliary")
    add_options(parser, ExportOptions, only=OPTION_FIELDS)
    formats = f"{', '.join(FORMATS)} (default %(default)s); {WORKER} writes the configuration of TensorRT-LLM's worker"
    parser.add_argument("--to", dest="format", default=ExportOptions.format, help=formats)
    gpus = "GPUs that a tensorrt-rtx plan is for, such as 8.6 8.9 12.0 (default: all supported)"
    parser.add_argument(
        "--compute-capability", dest="compute_capabilities", nargs="+", default=(), metavar="M.N", help=gpus
    )
    parser.add_argument("--defaults", type=json_object, default={}, help="decoding parameters, as JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder that differs")
    parser.add_argument("--dry-run", action="store_true", help="check the input and estimate; write nothing")
    options = parser.parse_args()
    if options.format == WORKER:
        for name in (*OPTION_FIELDS, "compute_capabilities", "overwrite", "dry_run"):
            if value := getattr(options, name, None):
                raise InvalidInput(name, value, f"--to {WORKER} makes no engines; leave it out")
        _write_worker(options.pair, options.target, options.auxiliary, options.defaults)
        return
    asked = ExportOptions(**given_options(options, ExportOptions))

    with waiting("loading PyTorch and transformers"):
        from engines.quiet import quiet_transformers

        quiet_transformers()
        from engines.folder import read_json
        from engines.memory import format_bytes
        from export.pair import export_pair
        from runtime.pair import store_costs

    if options.dry_run:
        print(_dry_run(options.pair.resolve(), asked, options.overwrite))
        return

    began = time.monotonic()
    written = export_pair(options.pair, asked, options.overwrite, print_stage)
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
        pair = shlex.quote(str(options.pair))
        print(f"next{where}: mtad generate {pair} '...', or mtad serve {pair}", file=sys.stderr)
    else:
        print("up to date; nothing was written", file=sys.stderr)
    print(options.pair)


def _write_worker(folder: Path, target: str, auxiliary: str | None, defaults: dict[str, object]) -> None:
    """`worker.yaml` in a new folder; models stay where they are, and their vocabularies are compared."""
    import yaml

    from engines.folder import write_folder
    from export.checkpoint.find import find
    from export.checkpoint.vocabulary import describe_vocabularies
    from mtad.params import DecodingParams
    from runtime.tensorrt_llm.worker import worker_config

    if auxiliary is None:
        raise InvalidInput("auxiliary", None, "the worker drafts by a second model; give its checkpoint")
    ExportOptions(target, auxiliary, format="torch", defaults=defaults)  # checks both
    target, auxiliary = (str(Path(one).absolute()) if Path(one).is_dir() else one for one in (target, auxiliary))
    values = worker_config(target, auxiliary, DecodingParams.from_dict({"beam_width": 1, "draft_len": 4} | defaults))
    models = [find("target", target, False), find("auxiliary", auxiliary, False)]
    for one in models:
        if not one.plain:
            raise InvalidInput(one.name, one.source, "the worker reads plain checkpoints only")
    sizes = [one.config.get_text_config().vocab_size for one in models]
    if "shared_tokens" in describe_vocabularies(*(one.tokenizer() for one in models), *sizes):
        raise InvalidInput("auxiliary", auxiliary, "its vocabulary is not the target's, which the worker needs")
    if folder.exists():
        raise InvalidInput("pair", str(folder), "exists already; give another name")
    with write_folder(folder.resolve()) as temporary:
        (temporary / "worker.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    print(folder / "worker.yaml")
    print(f"next: python -m runtime.tensorrt_llm {shlex.quote(str(folder / 'worker.yaml'))}", file=sys.stderr)


def _dry_run(folder: Path, asked: ExportOptions, overwrite: bool) -> str:
    """What the export would take, all of its input checked; weights are not downloaded."""
    from export.estimate import describe, estimate_pair
    from export.pair import check_folder
    from export.plan import plan_pair

    plan = plan_pair(asked, print_stage, weights=False)
    if not check_folder(folder, plan, overwrite or any(model.download for model, _, _ in plan.engines)):
        return "up to date; nothing to write"
    return describe(folder, *estimate_pair(folder, plan))
