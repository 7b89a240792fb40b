"""Checks of the demo pair exported for other libraries, and of TensorRT-LLM; skipped where the library is not."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from engines.folder import open_engine
from engines.placement import versions
from engines.tensorrt_llm.library import RELEASE
from engines.tensorrt_plan import load_runtime
from export.options import ExportOptions
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput, imported
from runtime.pair import ROLES
from runtime.tensorrt_llm.worker import WORKER, install, worker_config
from scripts.gpu import models
from scripts.gpu.correct import PROMPTS, compare_logits
from scripts.gpu.run import Run, Skip
from scripts.paths import DEMO

CHECKPOINTS = [str(DEMO / "pair" / role) for role in ROLES]


def exported(run: Run) -> None:
    """The export verifies its engines; then logits on the GPU, and texts, in a batch and in float32 also alone."""
    if not run.on_gpu:
        raise Skip("needs a GPU")
    format = "onnx" if run.check == "onnxruntime" else run.check
    try:
        if format == "onnx":
            imported("engines.onnx.providers", "onnxruntime", "missing", "install the extra cuda").check_cuda()
        else:
            load_runtime(format)
        if format == "tensorrt-llm":
            _require(RELEASE)
    except InvalidInput as refused:
        raise Skip(refused.problem) from None
    from export.pair import export_pair

    options: dict[str, Any] = {"format": format, "rows": 8, "capacity": 256}
    if format == "tensorrt-rtx":
        options["compute_capabilities"] = [".".join(map(str, torch.cuda.get_device_capability(run.device)))]
    config = RuntimeConfig(device=run.device, prefix_tokens=0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "pair")
        export_pair(folder, ExportOptions(*CHECKPOINTS, **options))
        for role in ROLES:
            engine = open_engine(folder / role, config.placement)
            compare_logits(run, role, engine, models.demo_model(role))
        llm = LLM(folder, config)
        for method in ("sample", "block", "mtad", "mmtad"):
            params = DecodingParams(method=method, draft_len=4, ignore_eos=True, max_tokens=48, seed=1)
            together = llm.generate(PROMPTS, params)
            if engine.spec.dtype == "float32":
                alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
                run.compare_texts(f"{method}: in a batch = alone", together, alone)
        if llm.blocks and llm.blocks.problem is None:
            run.compare("not captured", llm.blocks.unrecorded.total(), 0, f"blocks {dict(llm.blocks.unrecorded)}")


def tensorrt_llm(run: Run) -> None:
    """Our acceptance in TensorRT-LLM 1.4: greedy texts are those that the demo pair gives here."""
    _require(WORKER)
    greedy = DecodingParams(method="mtad", beam_width=1, temperature=0.0, ignore_eos=True, max_tokens=32)
    ours = models.open_llm(models.demo_pair(run.device), captured=True).generate(PROMPTS, greedy)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(worker_config(CHECKPOINTS[0], CHECKPOINTS[1], greedy), file)
        file.flush()
        given = install(Path(file.name))
    library = import_module("tensorrt_llm")
    sampling = library.SamplingParams(max_tokens=32, ignore_eos=True)
    answers = library.LLM(**given).generate([one.prompt_token_ids for one in ours], sampling)
    pairs = zip(ours, answers, strict=True)
    differ = sum(one.token_ids != list(answer.outputs[0].token_ids) for one, answer in pairs)
    run.compare("TensorRT-LLM = here, greedy", differ, 1, f"of {len(PROMPTS)} texts differ")


def _require(release: str) -> None:
    found = versions("tensorrt-llm").get("tensorrt-llm", "none")
    if not found.startswith(release):
        raise Skip(f"needs tensorrt-llm {release}; installed: {found}")
