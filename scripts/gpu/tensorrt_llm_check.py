"""What no machine here could say: whether TensorRT-LLM computes what is computed here. One table, then one JSON line.

Builds a pair with `mtad export --to tensorrt-llm` and compares, against the checkpoints in torch, float32:

* the target's logits at every position of a draft, fresh and again with its keys and values reused;
* the auxiliary's beams: the sum of the log-probabilities it reports, and whether they are a beam search's;
* texts, method by method, with those of the torch engine;
* texts with CUDA graphs on and off: of the executors, and of the PyTorch backend.

Exit code 0 if all is within bounds, 1 if not, 2 if it cannot be run. Not executed on engines; its comparisons are
tested on a fake of the library.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines import open_engine
from export.options import ExportOptions
from export.pair import export_pair
from export.tensorrt_llm.build import build_pair, plan_pair
from export.tensorrt_llm.engine_plan import TYPES
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM
from runtime.commands.entry import Parser, command
from runtime.decoder.engine_roles import EngineAuxiliary
from runtime.pair import open_pair
from runtime.tensorrt_llm import compat as library
from runtime.tensorrt_llm import pytorch_backend as pytorch
from runtime.tensorrt_llm.exchange import Course, Exchange
from runtime.tensorrt_llm.executor import Answer, Ask, Client, Logits, Search
from runtime.tensorrt_llm.llm import ExecutorLLM, read_pair
from runtime.tensorrt_llm.pytorch_drafts import Speculation
from scripts.gpu.checks import Check
from scripts.paths import DEMO

BOUNDS = {"float16": 0.02, "bfloat16": 0.15}
"""Largest difference of a logit that passes, in standard deviations of the logits, by dtype."""
METHODS = ("sample", "speculative", "mtad", "mmtad", "modal")
PROMPTS = (
    "SELECT name FROM singer WHERE age > 20",
    "def largest(values):\n    ",
    "How many singers are older than twenty?",
    "import os\nimport sys\n\n",
)
STEPS, WIDTH, DRAFT = 3, 3, 4


@command
def main() -> None:
    """Entry point of `scripts/trtllm_check.sh`."""
    parser = Parser(prog="trtllm_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="checkpoint: local folder or hub id (default: the demo pair's)")
    parser.add_argument("--auxiliary", help="checkpoint, same vocabulary")
    parser.add_argument("--work", type=Path, default=Path("build/tensorrt-llm"), help="folder for what is built")
    parser.add_argument("--dtype", default="float16", help="float16 or bfloat16 (default %(default)s)")
    parser.add_argument("--quantize", default="none", help="the target's weights: none, fp8, int4_awq")
    parser.add_argument("--calibration", help="data set to quantize with")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs an engine (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each text (default %(default)s)")
    parser.add_argument("--workers", action="store_true", help="executors in processes of their own")
    parser.add_argument("--no-pytorch", action="store_true", help="leave the PyTorch backend out")
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
    sources = [options.target or str(DEMO / "pair" / "target"), options.auxiliary or str(DEMO / "pair" / "auxiliary")]
    plan = plan_pair(
        sources[0],
        sources[1],
        rows=4,
        capacity=512,
        precision=options.dtype,
        draft_len=DRAFT,
        beam_width=WIDTH,
        tensor_parallel=options.tensor_parallel,
        quantization=options.quantize,
        calibration=options.calibration,
        defaults={"draft_len": DRAFT, "beam_width": WIDTH},
    )
    print(plan)
    folder, started = options.work / "pair", time.perf_counter()
    build_pair(plan, folder, overwrite=True)
    built = time.perf_counter() - started
    asked = ExportOptions(sources[0], sources[1], rows=4, capacity=512, format="torch")
    export_pair(options.work / "torch", asked, overwrite=True)
    folders = plan.target.checkpoint.folder, plan.auxiliary.checkpoint.folder
    found = check_executors(
        folder, folders, options.work / "torch", bindings, tokens=options.tokens, workers=options.workers
    )
    gc.collect()  # executors give their memory back when they go
    if not options.no_pytorch:
        found += check_backend(folders[0], options.work / "torch", options.tokens)
    result = report(found) | {
        "tensorrt_llm": library.installed(),
        "device": torch.cuda.get_device_name(),
        "build_seconds": round(built, 1),
        "plan": plan.to_dict(),
    }
    print(json.dumps(result))
    if not result["passed"]:
        raise SystemExit(1)


def check_executors(
    folder: Path,
    checkpoints: tuple[Path, Path],
    torch_pair: Path,
    bindings: Any,
    *,
    tokens: int,
    workers: bool = False,
    methods: Sequence[str] = METHODS,
) -> list[Check]:
    """Compare a pair's executors with torch; prints each figure as it is there.

    Args:
        folder: the pair, of engines.
        checkpoints: what it was built from, target and auxiliary.
        torch_pair: the same, exported for the torch engine.
        bindings: `tensorrt_llm.bindings.executor`.
        tokens: new tokens of each text.
        workers: see `ExecutorLLM`.
        methods: whose texts are compared.
    """
    found: list[Check] = []
    pair = read_pair(folder)
    spec = pair.target.spec
    bound = BOUNDS[spec.dtype] if spec.quantization == "none" else math.inf
    prompts = [list(pair.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    llm = ExecutorLLM(folder, bindings=bindings, workers=workers)
    target, auxiliary = llm.clients
    model = _model(checkpoints[0])
    drafts = [prompt[::-1][:DRAFT] for prompt in prompts]
    fresh, again = (_answers(target, [Logits(*each) for each in zip(prompts, drafts, strict=True)]) for _ in range(2))
    reference = [
        _logits(model, prompt, draft, llm.pair.vocab_size) for prompt, draft in zip(prompts, drafts, strict=True)
    ]
    for name, answers in (("target logits", fresh), ("target logits, reused", again)):
        worst = max(
            float((answer.logits[0] - expected).abs().max() / expected.std())
            for answer, expected in zip(answers, reference, strict=True)
        )
        found.append(_told(Check(name, worst, bound, "standard deviations")))
    reused = max(float((a.logits - b.logits).abs().max()) for a, b in zip(fresh, again, strict=True))
    found.append(_told(Check("target logits, fresh against reused", reused, math.inf, "")))
    found += _beams(auxiliary, _model(checkpoints[1]), prompts, llm.pair.vocab_size, BOUNDS[spec.dtype])
    llm.close()

    texts = {}
    for graphs in (True, False):
        for drafting in ("search", "steps"):
            llm = ExecutorLLM(folder, drafting, cuda_graphs=graphs, bindings=bindings, workers=workers)
            for method in methods:
                texts[graphs, drafting, method] = _texts(llm, prompts, method, tokens)
            llm.close()
    differing = [key for key in texts if key[0] and texts[key] != texts[False, *key[1:]]]
    found.append(_told(Check("graphs on and off", len(differing), 0, "methods differ")))
    torch_llm = LLM(torch_pair)
    for method in methods:
        expected = _texts(torch_llm, prompts, method, tokens)
        share = _shared(texts[True, "steps", method], expected)
        # half precision may choose another of two tokens as good as alike, and the rest of the text is another one then
        allowed = 0.5 if spec.quantization == "none" else math.inf
        found.append(_told(Check(f"{method}: text not the torch engine's", 1 - share, allowed, "of its tokens")))
    return found


def check_backend(target: Path, torch_pair: Path, tokens: int) -> list[Check]:
    """The PyTorch backend with our drafts and decisions, graphs on and off.

    Args:
        target: its checkpoint.
        torch_pair, tokens: see `check_executors`.
    """
    sampling = library.load("tensorrt_llm").SamplingParams
    pair = open_pair(torch_pair)
    prompts = [list(pair.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    params = DecodingParams(method="mtad", draft_len=DRAFT, beam_width=WIDTH, temperature=0.0)
    texts, accepted = {}, {}
    for graphs in (True, False):
        auxiliary = EngineAuxiliary(open_engine(torch_pair / "auxiliary", rows=len(prompts)), pair.vocab_size)
        speculation = Speculation(auxiliary, len(prompts), params, pair.vocab_size, pair.eos)
        llm = pytorch.open_llm(str(target), speculation, batch_size=len(prompts), cuda_graphs=graphs)
        results = llm.generate(prompts, sampling(max_tokens=tokens, temperature=0.0))
        texts[graphs] = [list(result.outputs[0].token_ids) for result in results]
        accepted[graphs] = speculation.accepted / max(1, speculation.decided)
        llm.shutdown()
        gc.collect()
    differing = sum(a != b for a, b in zip(texts[True], texts[False], strict=True))
    return [
        _told(Check("PyTorch backend, graphs on and off", differing, 0, "texts differ")),
        _told(Check("PyTorch backend, accepted a block", accepted[True], math.inf, "tokens")),
    ]


def report(found: Sequence[Check]) -> dict[str, Any]:
    """Plain values, for JSON: no infinities."""
    rows = [{**asdict(each), "passed": each.passed} for each in found]
    for row in rows:
        row["allowed"] = None if math.isinf(row["allowed"]) else row["allowed"]
        row["found"] = None if math.isnan(row["found"]) else row["found"]
    return {"passed": all(each.passed for each in found), "checks": rows}


def _told(check: Check) -> Check:
    print(check, flush=True)
    return check


def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.inference_mode()
def _logits(model: PreTrainedModel, prompt: list[int], draft: list[int], vocab_size: int) -> torch.Tensor:
    """After the prompt and each drafted token: float32 [1 + drafted, V]."""
    logits: torch.Tensor = model(torch.tensor([[*prompt, *draft]])).logits[0, len(prompt) - 1 :, :vocab_size]
    return logits.float()


def _answers(client: Client, asks: Sequence[Ask]) -> list[Answer]:
    """What an executor answers, all asked at once."""

    def course() -> Course[list[Answer]]:
        return (yield [(client, ask) for ask in asks])

    return Exchange().run(course())


def _beams(
    auxiliary: Client, model: PreTrainedModel, prompts: Sequence[list[int]], vocab_size: int, bound: float
) -> list[Check]:
    """What the auxiliary says of its beams, against what the checkpoint says of the same tokens."""
    answers = _answers(auxiliary, [Search(prompt, STEPS, WIDTH) for prompt in prompts])
    worst, missed = 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        own = _search(model, prompt, vocab_size)
        missed += len(own.keys() - set(map(tuple, answer.tokens)))
        for tokens, log_probs in zip(answer.tokens, answer.log_probs, strict=True):
            logits = _logits(model, prompt, tokens[:-1], auxiliary.spec.vocab_size)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum()
            worst = max(worst, abs(sum(log_probs) - float(expected)) / STEPS)
    return [
        _told(Check("auxiliary log-probabilities", worst, 5 * bound, "nats a token")),
        _told(Check("auxiliary beams not a beam search's", missed, len(prompts), f"of {len(prompts) * WIDTH}")),
    ]


def _search(model: PreTrainedModel, prompt: list[int], vocab_size: int) -> dict[tuple[int, ...], float]:
    """The likeliest `WIDTH` continuations of `STEPS` tokens that a plain beam search finds."""
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(STEPS):
        grown = {}
        for tokens, weight in beams.items():
            found = _logits(model, [*prompt, *tokens], [], vocab_size)[-1].log_softmax(-1).topk(WIDTH)
            for value, token in zip(found.values.tolist(), found.indices.tolist(), strict=True):
                grown[*tokens, token] = weight + value
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:WIDTH])
    return beams


def _texts(llm: LLM, prompts: Sequence[list[int]], method: str, tokens: int) -> list[list[int]]:
    params = DecodingParams(
        method=method, draft_len=DRAFT, beam_width=WIDTH, temperature=0.0, max_tokens=tokens, speculation="fixed"
    )
    return [result.token_ids for result in llm.generate(prompts, params)]


def _shared(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of tokens that come before the first difference."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
    return same / max(1, sum(map(len, theirs)))


if __name__ == "__main__":
    main()
