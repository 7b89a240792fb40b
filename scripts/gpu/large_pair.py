"""Train a larger pair on the Python source a machine has, and compare decoding methods on packages it has never seen.

    python -m scripts.gpu.large_pair --minutes 4                     on a GPU, no network: 300 M target, 20 M auxiliary
    python -m scripts.gpu.large_pair --minutes 20 --call-minutes 9   stops after 9 minutes; the same command goes on
    python -m scripts.gpu.large_pair --device cpu --size tiny --minutes 0.2 --folder build/tiny-pair

Stages, those that are left of them in the folder:

* corpus: the standard library and all installed packages (or --sources), about a tenth of the packages held out whole;
  one tokenizer for both models.
* target, auxiliary: trained within four fifths and one fifth of --minutes, the auxiliary half of its time on the
  target's distribution. Checkpoints are written every 100 steps: a call that is killed is gone on with too.
* export: the pair folder, torch format, bfloat16, not verified.
* evaluation: `scripts.evaluation` on held-out windows: tokens/s, block efficiency, perplexity under the target, joules
  a token; the table has ratios to `speculative`, and the facts the fastest setting of each method whose perplexity is
  at most that of `sample`. `python -m scripts.evaluation` compares again, in any other way.

Weights and text stay in --folder, whose report.json has the figures; delete it to begin anew. Exit code 0 when all is
done, 75 when the same command has more to do. On a GPU: not executed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from scripts.gpu.compared import at_equal_quality, summary
from scripts.gpu.report import Found, Report

ROLES = ("target", "auxiliary")
STAGES = ("corpus", *ROLES, "export", "evaluation")
SHARES = {"target": 0.8, "auxiliary": 0.2}
"""Of the minutes of training."""
RESERVE = 20.0
"""Seconds that a step, a look at held-out text and a checkpoint may take behind the end of a call."""
NEEDED = {"export": 60.0, "evaluation": 300.0}
"""Seconds that have to be left of a call for a stage that cannot be gone on with, unless it is the call's first."""
MORE = 75
"""Exit code of a call that did not get to the end."""
SHOWN, WINDOWS = 48, 400
"""Held-out windows: those whose loss is followed in training, half at most, and all. The others are compared on."""
COMPARED = "sample,speculative,block," + ",".join(
    f"{method}:accept_threshold={threshold}" for method in ("mtad", "mmtad") for threshold in (0.1, 0.3, 0.5, 0.8)
)
"""Settings that are compared: the lossless ones, and those of the paper from fast to careful."""
TOKENIZED = 40_000_000
"""Characters of the training text, spread over all files, that the tokenizer is trained on."""


@dataclass(frozen=True)
class Large:
    """A pair in the making.

    Args:
        options: of the command line.
        deadline: when this call has to end, `time.monotonic()`.
    """

    options: argparse.Namespace
    deadline: float

    @property
    def folder(self) -> Path:
        """Of everything that is written."""
        found: Path = self.options.folder
        return found

    def corpus(self, found: Found) -> bool:
        """Text, tokenizer and held-out windows."""
        from scripts.demo import batches, packages, tokenizer
        from scripts.demo.recipes import SIZES

        work = self.folder / "corpus"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        sources = packages.read(self.options.sources or packages.folders())
        every = math.ceil(sum(map(len, sources.train)) / TOKENIZED)
        size = SIZES[self.options.size].vocabulary
        words = tokenizer.load(work / "tokenizer", lambda: sources.train[::every], size)
        code = batches.code_tokens(words, work, sources.train)
        windows = packages.windows(sources, WINDOWS, seed=1)
        shown = min(SHOWN, len(windows) // 2)
        if not shown:
            problem = f"give more: {len(windows)} windows of held-out packages, at least 2 are needed"
            raise InvalidInput("sources", ", ".join(sources.packages), problem)
        for name, some in (("shown", windows[:shown]), ("held-out", windows[shown:])):
            lines = (json.dumps({"prompt": prompt, "continuation": rest}) + "\n" for prompt, rest in some)
            (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        found.note(
            files=len(sources.train),
            characters=sum(map(len, sources.train)),
            tokens=len(code),
            vocabulary=len(words),
            held_out_files=len(sources.held_out),
            held_out_characters=sum(map(len, sources.held_out)),
            held_out_packages=", ".join(sources.packages),
        )
        return True

    def train(self, role: str, found: Found) -> bool:
        """A model, until its time or this call's is up; published when it is done."""
        from scripts.demo import batches, tokenizer
        from scripts.demo.recipes import SIZES
        from scripts.demo.schedule import Limit
        from scripts.demo.train import Material, Trainer, publish

        corpus, work = self.folder / "corpus", self.folder / "training" / role
        words = tokenizer.load(corpus / "tokenizer")
        lines = (corpus / "shown.jsonl").read_text(encoding="utf-8").splitlines()
        shown = [(one["prompt"], one["continuation"]) for one in map(json.loads, lines)]
        material = Material(words, batches.code_tokens(words, corpus, ()), {"code": shown})
        recipe = SIZES[self.options.size].recipe(role, len(words))
        device, compiled = self.options.device, self.options.compile
        trainer = Trainer(recipe, material, work, self.folder, device, compiled=compiled)
        seconds = 60 * self.options.minutes * SHARES[role]
        complete = trainer.train(Limit(seconds=seconds, until=self.deadline - RESERVE), role)
        found.note(
            parameters=sum(p.numel() for p in trainer.model.parameters()),
            steps=trainer.step,
            tokens_seen=trainer.step * recipe.rows * recipe.length,
            training_seconds=trainer.seconds,
        )
        if complete:
            publish(recipe, words, work, self.folder)
            last = json.loads(trainer.log.read_text().splitlines()[-1])
            found.note(training_nll=last["train_code"], held_out_nll=last.get("development_code"))
        return complete

    def export(self, found: Found) -> bool:
        """The pair folder, as `mtad export --to torch` writes it; not verified, which needs the packages of ONNX."""
        from engines.folder import vocabulary_hash, write_json, write_spec
        from export.checkpoint.checkpoint import find

        to = self.folder / "pair"
        for role in ROLES:
            checkpoint = find(role, str(self.folder / "checkpoints" / role))
            spec, words = checkpoint.spec(8, 1024, "bfloat16", "torch"), checkpoint.tokenizer()
            checkpoint.load(spec.torch_dtype).save_pretrained(to / role)
            words.save_pretrained(to / role)
            write_spec(to / role, spec)
        pair = {"vocab_size": len(words), "vocabulary_hash": vocabulary_hash(words.get_vocab()), "defaults": {}}
        write_json(to / "pair.json", pair)
        found.note(capacity=spec.capacity, precision=spec.precision)
        return True

    def evaluate(self, found: Found, report: Report) -> bool:
        """Methods side by side; the whole of what `scripts.evaluation` reports is kept in the stage."""
        from scripts.evaluation import command

        own = self.options
        given = ["--pair", str(self.folder / "pair"), "--set", f"jsonl={self.folder / 'corpus' / 'held-out.jsonl'}"]
        given += ["--device", own.device, "--limit", str(own.prompts), "--batch", str(own.batch)]
        given += ["--params", json.dumps({"max_tokens": own.max_tokens}), "--baselines", "none"]
        given += ["--methods", own.methods]
        whole = command.compare(command.parser().parse_args(given))
        stage = report.stage("evaluation", rows=[], evaluation=whole)
        for label, row in whole["sets"]["held-out"]["settings"].items():
            stage["rows"].append(summary(label, row))
        found.note(energy=whole["energy"], prompts=whole["sets"]["held-out"]["prompts"], batch=whole["batch"])
        found.note(fastest_at_equal_quality=at_equal_quality(stage["rows"]))
        return True


def parser() -> Parser:
    own = Parser(prog="large_pair", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--folder", type=Path, default=Path("build/large-pair"), help="(default %(default)s)")
    own.add_argument("--size", choices=("large", "tiny"), default="large", help="(default %(default)s)")
    own.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default %(default)s)")
    own.add_argument("--sources", nargs="+", type=Path, help="folders of packages (default: this Python's)")
    own.add_argument("--copy", type=Path, help="a second file for the report")
    own.add_argument("--minutes", type=float, default=4.0, help="of training in all (default %(default)s)")
    own.add_argument("--call-minutes", type=float, default=math.inf, help="of this call (default: as long as it takes)")
    own.add_argument("--compile", action="store_true", help="torch.compile for the layers in training")
    own.add_argument("--methods", default=COMPARED, help="settings compared, as of scripts.evaluation")
    own.add_argument("--prompts", type=int, default=24, help="held-out windows continued (default %(default)s)")
    own.add_argument("--max-tokens", type=int, default=128, help="of a continuation (default %(default)s)")
    own.add_argument("--batch", type=int, default=1, help="prompts decoded at once (default %(default)s)")
    return own


def open_report(options: argparse.Namespace) -> Report:
    """The folder's report, of a pair as the options want it, or a new one.

    Raises:
        InvalidInput: the folder has a pair of another size or other sources.
    """
    from scripts.gpu.place import gpu
    from scripts.machine import machine

    path: Path = options.folder / "report.json"
    made = {"size": options.size, "sources": [str(folder) for folder in options.sources or ()]}
    report = Report(path, copy=options.copy) if path.exists() else None
    if report is None or not report.ended("corpus"):  # nothing is made yet
        path.parent.mkdir(parents=True, exist_ok=True)
        report = Report(path, {**made, "machine": machine(), "calls": []}, copy=options.copy)
    if {name: report.values[name] for name in made} != made:
        raise InvalidInput("folder", str(options.folder), "has a pair of another size or sources; give another one")
    facts = None if options.device == "cpu" else gpu(options.device)
    report.values["calls"].append({"options": " ".join(sys.argv[1:]), "gpu": facts})
    report.save()
    return report


def _free() -> None:
    """Give a stage's memory back to the device."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@command
def main() -> None:
    began = time.monotonic()
    options = parser().parse_args()
    for name in ("minutes", "call_minutes", "prompts", "max_tokens", "batch"):
        if not getattr(options, name) > 0:
            raise InvalidInput(name, getattr(options, name), "give more than 0")
    from engines.placement import Placement
    from engines.quiet import quiet_transformers

    options.device = Placement(options.device).device
    quiet_transformers()
    report = open_report(options)
    large = Large(options, began + 60 * options.call_minutes)
    works: dict[str, Callable[[Found], bool]] = {
        "corpus": large.corpus,
        **{role: partial(large.train, role) for role in ROLES},
        "export": large.export,
        "evaluation": partial(large.evaluate, report=report),
    }
    left = [name for name in STAGES if report.values["stages"].get(name, {}).get("state") != "done"]
    for name in (todo := list(left)):
        if name != todo[0] and time.monotonic() + NEEDED.get(name, 0.0) >= large.deadline:
            break
        started, spent = time.monotonic(), report.values["stages"].get(name, {}).get("seconds", 0.0)
        report.stage(name, state="running")
        complete = works[name](Found(report, name))
        seconds = spent + time.monotonic() - started
        report.stage(name, state="done" if complete else "out of time", seconds=seconds)
        _free()
        if not complete:
            break
        left.remove(name)
    print(report.table())
    print(report.path)
    if left:
        print(f"left: {', '.join(left)}; the same command goes on", file=sys.stderr)
        sys.exit(MORE)


if __name__ == "__main__":
    main()
