"""How much memory an export takes: a checkpoint of random weights, exported in a process of its own, and its peak.

python -m scripts.export_memory FOLDER [--layers 24] [--precision float32] [--to onnx]

`FOLDER` needs room for the checkpoint twice (three times where it is quantised); what is written there stays. Peaks are
those of the exporting process: resident memory as the kernel counts it at the end (`ru_maxrss`), pages of mapped files
included, and anonymous memory alone, sampled, which is what cannot be given back to other processes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from engines.base import DTYPES
from export.checkpoint.weights import empty_model
from runtime.commands.entry import Parser, command
from scripts.paths import DEMO

SHARD = 2 * 10**9


def write_checkpoint(folder: Path, layers: int, dtype: torch.dtype) -> int:
    """A random Llama checkpoint, written shard by shard, if it is not there; returns the bytes of its weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=4096, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "pair" / "target", local_files_only=True).save_pretrained(folder)
    model: AutoModelForCausalLM = empty_model(config, dtype)
    generator = torch.Generator().manual_seed(0)
    places, shard, size, total = dict[str, str](), dict[str, torch.Tensor](), 0, 0

    def flush() -> None:
        name = f"model-{len(set(places.values())):05}.safetensors"
        places.update(dict.fromkeys(shard, name))
        save_file(shard, folder / name, metadata={"format": "pt"})
        shard.clear()
        print(f"checkpoint: {total / 1e9:.1f} GB written", file=sys.stderr, flush=True)

    for name, parameter in model.named_parameters():
        scale = 0.02 if parameter.ndim > 1 else 1.0
        shard[name] = (scale * torch.randn(parameter.shape, generator=generator)).to(dtype)
        size += shard[name].nbytes
        total += shard[name].nbytes
        if size > SHARD:
            flush()
            size = 0
    flush()
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def anonymous(process: int) -> int:
    """Bytes of anonymous resident memory of a process now; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def export(folder: Path, checkpoint: Path, precision: str, format: str) -> dict[str, Any]:
    """Export the checkpoint as a target beside the demo's auxiliary, in a process of its own."""
    main = "from runtime.commands.export import main; main()"
    arguments = ["--target", checkpoint, "--auxiliary", DEMO / "pair" / "auxiliary", "--rows", 1, "--capacity", 256]
    arguments += ["--to", format, "--precision", precision]
    if format == "onnx":
        arguments += ["--auxiliary-precision", "float32"]
    if precision not in DTYPES:
        arguments += ["--calibration", DEMO / "data" / "development.jsonl"]
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-c", main, str(folder), *map(str, arguments)])
    said = began
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        if time.perf_counter() > said + 30:
            said = time.perf_counter()
            print(f"export: {said - began:.0f} s, at most {peak / 1e9:.1f} GB so far", file=sys.stderr, flush=True)
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(process.returncode)
    files = sorted((folder / "target").glob("model*"))
    return {
        "format": format,
        "precision": precision,
        "seconds": round(time.perf_counter() - began, 1),
        "engine_bytes": sum(file.stat().st_size for file in files),
        "engine_files": [file.name for file in files],
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        "peak_anonymous_bytes": peak,
    }


@command
def main() -> None:
    parser = Parser(prog="scripts.export_memory", description="Memory an export takes.")
    parser.add_argument("folder", type=Path, help="folder to work in")
    parser.add_argument("--layers", type=int, default=24, help="layers of the checkpoint (default %(default)s: 1.6 B)")
    parser.add_argument("--stored", choices=DTYPES, default="float32", help="its dtype (default %(default)s)")
    parser.add_argument("--precision", default="float32", help="of the engine (default %(default)s)")
    parser.add_argument("--to", choices=("onnx", "torch"), default="onnx", help="its format (default %(default)s)")
    options = parser.parse_args()
    checkpoint = options.folder / f"checkpoint-{options.layers}-{options.stored}"
    size = write_checkpoint(checkpoint, options.layers, DTYPES[options.stored])
    pair = options.folder / f"pair-{options.to}-{options.precision}"
    found = export(pair, checkpoint, options.precision, options.to)
    ratio = found["peak_resident_bytes"] / size
    print(json.dumps({"stored": options.stored, "checkpoint_bytes": size, **found, "peak_ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
