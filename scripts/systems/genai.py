"""onnxruntime-genai."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from scripts.paths import ROOT
from scripts.systems.system import Batched, Finished, Prompt, useful

GENAI = ROOT / "build" / "baselines"
"""Where scripts/baselines.sh puts onnxruntime-genai and the models its builder makes."""


class GenAI(Batched):
    """onnxruntime-genai's `Generator` on right-padded batches, the library's defaults but for sampling and threads.

    Its continuous batching (`Engine`) needs paged attention, which its builder makes for GPUs only; on a CPU an
    `Engine` runs static batches of at most 4, so the batched `Generator` is the faster one. Right padding is what its
    models want: positions are counted from the left, and left-padded prompts give wrong text.

    Args:
        folder: what scripts/baselines.sh made.
        threads: CPU threads.
        model: what its builder made of a checkpoint; with a draft model, batches are of one. By default, the demo's
            target.
    """

    name = "onnxruntime-genai"

    def __init__(self, folder: Path = GENAI, threads: int = 1, model: Path | None = None) -> None:
        model = model or folder / "target"
        if not (model / "genai_config.json").is_file() or not (folder / "onnxruntime_genai").is_dir():
            remedy = "not installed there; run scripts/baselines.sh, or leave it out: --baselines huggingface or none"
            raise InvalidInput("baselines", str(folder), remedy)
        sys.path.append(str(folder))
        try:
            import onnxruntime_genai as genai  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            problem = f"onnxruntime-genai cannot be imported ({error}); run scripts/baselines.sh"
            raise InvalidInput("baselines", str(folder), problem) from error
        finally:
            sys.path.remove(str(folder))
        self._genai: Any = genai
        self.version = f"{genai.__version__} on {Path(os.environ['ORT_LIB_PATH']).name}"
        config = genai.Config(str(model))
        config.clear_providers()
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = genai.Model(config)
        values = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]
        self.largest = 1 if "draft" in values else None
        eos = values["eos_token_id"]
        self._eos, self._pad = [eos] if isinstance(eos, int) else list(eos), int(values["pad_token_id"])
        self._seed = 0

    def _run(self, batch: list[Prompt], params: DecodingParams) -> list[Finished]:
        longest = max(len(prompt.ids) for prompt in batch)
        padded = [list(prompt.ids) + [self._pad] * (longest - len(prompt.ids)) for prompt in batch]
        self._seed += 1
        started = time.perf_counter()
        options = self._genai.GeneratorParams(self._model)
        options.set_search_options(
            batch_size=len(batch),
            max_length=longest + params.max_tokens,
            min_length=longest + params.max_tokens if params.ignore_eos else 0,
            do_sample=True,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            random_seed=self._seed,
        )
        generator = self._genai.Generator(self._model, options)
        generator.append_tokens(np.array(padded, dtype=np.int32))
        first, ends = 0.0, [0.0] * len(batch)
        while not generator.is_done():
            generator.generate_next_token()
            now = time.perf_counter() - started
            first = first or now
            for row, token in enumerate(generator.get_next_tokens()):
                if not ends[row] and token in self._eos:
                    ends[row] = now
        whole = time.perf_counter() - started
        texts = [useful(generator.get_sequence(row)[longest:].tolist(), self._eos) for row in range(len(batch))]
        return [
            Finished(prompt.number, text, first, end or whole)
            for prompt, text, end in zip(batch, texts, ends, strict=True)
        ]
