"""What no machine here could say: whether TensorRT-LLM does what its sources say, and computes what torch computes.

Builds a pair with `mtad export --to tensorrt-llm`; answers, each by an experiment on its executors, the questions C1 to
C5 of docs/tensorrt-llm.md; compares texts of `sample` and `mtad` with the torch engine's; measures tokens per second.
All of it goes to one JSON file. Exit code 0 if all that is needed holds, 1 if not, 2 if it cannot be run. Not executed
on engines; tested on a fake of the library.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from engines.tensorrt_llm_spec import FORMAT
from export.options import ExportOptions
from export.pair import export_pair
from export.tensorrt_llm.build import build_pair, plan_pair
from export.tensorrt_llm.engine_plan import TYPES
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM
from runtime.commands.entry import Parser, command
from runtime.tensorrt_llm import compat as library
from runtime.tensorrt_llm.executor import ExecutorClient
from runtime.tensorrt_llm.llm import ExecutorLLM, read_pair
from scripts.gpu.checks import Check
from scripts.paths import DEMO

PROMPTS = (
    "SELECT name FROM singer WHERE age > 20",
    "def largest(values):\n    ",
    "How many singers are older than twenty?",
    "import os\nimport sys\n\n",
)
ROWS, CAPACITY, WIDTH, DRAFT = 4, 256, 3, 4

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What an experiment said.

    Attributes:
        name: the question's, in docs/tensorrt-llm.md.
        question: the question.
        answer: yes or no.
        assumed: what the sources say.
        needed: whether this package relies on it; else it only avoids what may come of it.
    """

    name: str
    question: str
    answer: bool
    assumed: bool = True
    needed: bool = True

    @property
    def passed(self) -> bool:
        return self.answer == self.assumed or not self.needed

    def __str__(self) -> str:
        verdict = "ok" if self.answer == self.assumed else "FAILED" if self.needed else "other"
        return f"{verdict:<7}{self.name}: {self.question} {'yes' if self.answer else 'no'}"


class Altered:
    """The bindings with some names replaced."""

    def __init__(self, bindings: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)


@command
def main() -> None:
    """Entry point of `scripts/gpu/trtllm_check.sh`."""
    parser = Parser(prog="trtllm_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="checkpoint: local folder or hub id (default: the demo pair's)")
    parser.add_argument("--auxiliary", help="checkpoint, same vocabulary")
    parser.add_argument("--work", type=Path, default=Path("build/tensorrt-llm"), help="folder for what is built")
    parser.add_argument("--dtype", default="float16", help="float16 or bfloat16 (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each text (default %(default)s)")
    options = parser.parse_args()
    if (options.target is None) != (options.auxiliary is None):
        raise InvalidInput("target", options.target, "give --target and --auxiliary, or neither for the demo pair")
    if options.tokens < 1:
        raise InvalidInput("tokens", options.tokens, "give at least 1")
    if options.dtype not in TYPES:
        raise InvalidInput("dtype", options.dtype, f"choose one of {', '.join(TYPES)}")
    bindings = library.executor_bindings()
    if not torch.cuda.is_available():
        raise InvalidInput("device", "cpu", "TensorRT-LLM needs an NVIDIA GPU, and torch sees none")
    versions = {
        "tensorrt-llm": library.installed(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(),
    }
    print(versions, flush=True)
    sources = [options.target or str(DEMO / "pair" / "target"), options.auxiliary or str(DEMO / "pair" / "auxiliary")]
    defaults = {"draft_len": DRAFT, "beam_width": WIDTH}
    sizes: dict[str, Any] = {"rows": ROWS, "capacity": CAPACITY}
    asked = ExportOptions(*sources, **sizes, precision=options.dtype, defaults=defaults, format=FORMAT)
    plan = plan_pair(asked, draft_len=DRAFT, beam_width=WIDTH)
    print(plan, flush=True)
    started = time.perf_counter()
    build_pair(plan, options.work / "pair", overwrite=True)
    built = time.perf_counter() - started
    export_pair(options.work / "torch", ExportOptions(*sources, **sizes, format="torch"), overwrite=True)
    result = run(options.work / "pair", options.work / "torch", bindings, options.tokens) | {
        "versions": versions,
        "build_seconds": round(built, 1),
        "plan": plan.to_dict(),
    }
    file = options.work / "check.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)
    if not result["passed"]:
        raise SystemExit(1)


def run(folder: Path, torch_pair: Path, bindings: Any, tokens: int) -> dict[str, Any]:
    """All experiments and comparisons of a pair of engines, and of the same exported for torch; prints each."""
    pair = read_pair(folder)
    prompts = [list(pair.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    found: list[Answer | Check] = [_told(answer) for answer in experiments(folder, pair, bindings, prompts)]
    checks, speeds = compare(folder, torch_pair, bindings, prompts, tokens)
    found += checks
    rows = [{**asdict(each), "passed": each.passed} for each in found]
    return {"passed": all(each.passed for each in found), "checks": rows, "tokens_per_second": speeds}


def experiments(folder: Path, pair: Any, bindings: Any, prompts: list[list[int]]) -> Iterator[Answer]:
    """The questions, on engines that are opened for each."""

    @contextmanager
    def opened(role: str, **config: Any) -> Iterator[ExecutorClient]:
        spec = (pair.target if role == "target" else pair.auxiliary).spec

        def configured(**values: Any) -> Any:
            return bindings.ExecutorConfig(**{**values, **config})

        client = ExecutorClient.open(folder / role, Altered(bindings, ExecutorConfig=configured), spec, pair.vocab_size)
        try:
            yield client
        finally:
            client.close()

    def scored(client: ExecutorClient, texts: Sequence[Sequence[int]], bare: int = 0) -> list[int]:
        """Drafted tokens that each text gets rows for, of drafts that hardly fit it; the last `bare` ones have none."""
        drafts = [text[::-1][:DRAFT] for text in texts]
        found = client.logits(texts, [*drafts[: len(texts) - bare], *[[]] * bare])
        return [0 if rows is None else len(rows) - 1 for rows in found]

    def one_beam(**values: Any) -> Any:
        return bindings.SamplingConfig(**{**values, "beam_width": 1})

    def tokens_alone(tokens: list[int], **_: Any) -> Any:
        return bindings.ExternalDraftTokensConfig(tokens)

    long = [(prompt * CAPACITY)[: CAPACITY // 2] for prompt in prompts]  # whole blocks, with no room for a draft
    with opened("target") as target:
        whole = scored(target, prompts) == [DRAFT] * len(prompts)
        yield Answer("C1", "Is every row of a draft returned, as it is offered here?", whole)
        beside = scored(target, [*prompts, prompts[0]], bare=1) == [*[DRAFT] * len(prompts), 0]
        yield Answer("C1", "Also beside a request without a draft?", beside)
        bare = Altered(bindings, ExternalDraftTokensConfig=tokens_alone)
        plain = ExecutorClient(target._executor, bare, target.spec, pair.vocab_size)
        yield Answer("C1", "Are rows missing without draft logits?", min(scored(plain, prompts)) < DRAFT, needed=False)
    with opened("target", enable_chunked_context=True, max_num_tokens=CAPACITY) as target:
        yield Answer("C2", "Does chunked context discard drafts?", min(scored(target, long)) < DRAFT, needed=False)
        fresh, again = (target.logits([long[0] + [prompts[1][0]]], [[]])[0] for _ in range(2))
        same = fresh is not None and again is not None and torch.allclose(fresh, again, atol=0.05 * float(fresh.std()))
        yield Answer("C5", "Are logits the same when chunked context reuses keys and values?", same, False, False)
    for most, together in ((CAPACITY, False), (pair.target.spec.max_num_tokens, True)):
        with opened("target", max_num_tokens=most) as target:
            scored(target, long)
            target._executor.get_latest_iteration_stats()
            scored(target, long)  # every text is stored by now
            stats = target._executor.get_latest_iteration_stats()
            largest = max((each.inflight_batching_stats.num_context_requests for each in stats), default=0)
        question = f"Of {len(long)} texts that are stored, do all run at once with {most} tokens per iteration?"
        yield Answer("C3", question, largest == len(long), together, together)
    with opened("auxiliary") as auxiliary:
        before = auxiliary.search(prompts, [DRAFT] * len(prompts))
        yield Answer("C4", "Does a search with graphs repeat itself?", before == auxiliary.search(prompts, [DRAFT] * 4))
        narrow = ExecutorClient(
            auxiliary._executor, Altered(bindings, SamplingConfig=one_beam), auxiliary.spec, pair.vocab_size
        )
        narrow.logits(prompts, [()] * len(prompts))
        changed = before != auxiliary.search(prompts, [DRAFT] * len(prompts))
        yield Answer("C4", "Does it find something else after a request of another beam width?", changed, needed=False)


def compare(
    folder: Path, torch_pair: Path, bindings: Any, prompts: list[list[int]], tokens: int
) -> tuple[list[Check], dict[str, float]]:
    """Texts against the torch engine's, and tokens per second, by method."""
    ours, theirs = ExecutorLLM(folder, bindings=bindings), LLM(torch_pair)
    found, speeds = list[Check](), dict[str, float]()
    for method in ("sample", "mtad"):
        values = {
            "method": method,
            "draft_len": DRAFT,
            "beam_width": WIDTH,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
        }
        params = DecodingParams.from_dict({**values, "max_tokens": tokens})
        ours.generate(prompts, params)  # warms up
        started = time.perf_counter()
        texts = [result.token_ids for result in ours.generate(prompts, params)]
        speeds[method] = round(sum(map(len, texts)) / (time.perf_counter() - started), 1)
        share = _shared(texts, [result.token_ids for result in theirs.generate(prompts, params)])
        # half precision may choose another of two tokens as good as alike, and the rest of the text is another one then
        found.append(_told(Check(f"{method}: text not the torch engine's", 1 - share, 0.5, "of its tokens")))
    ours.close()
    print(speeds, "tokens per second", flush=True)
    return found, speeds


def _shared(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of tokens that come before the first difference."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
    return same / max(1, sum(map(len, theirs)))


def _told(what: T) -> T:
    print(what, flush=True)
    return what


if __name__ == "__main__":
    main()
