"""A worker that runs llama.cpp's server, as the package xllamacpp has it, in the environment of scripts/baselines.sh.

Settings: weights, GGUF's name of their type; kv_cache, ggml's name of the type of keys and values.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import xllamacpp  # type: ignore[import-not-found, unused-ignore]
from safetensors.numpy import load_file

from scripts.bench.peers.protocol import ROLES, Answer, Job, made_once, serve

CAPACITY = 1024  # columns of a request's cache, as of our export
NGRAM = 3  # tokens of a suffix that is looked up; by default, 12, which seldom recur


def convert(source: Path, path: Path, weights: str) -> None:
    """Write a Llama checkpoint with a byte-level tokenizer as GGUF."""
    config, tokenizer = (json.loads((source / name).read_text()) for name in ("config.json", "tokenizer.json"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out = gguf.GGUFWriter(path, config["model_type"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads["q_proj"])
    out.add_head_count_kv(heads["k_proj"])
    for add in (out.add_rope_dimension_count, out.add_key_length, out.add_value_length):
        add(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    vocabulary, types = tokenizer["model"]["vocab"], (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    out.add_tokenizer_model("gpt2")  # prompts are given as ids, so nothing is ever encoded
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(sorted(vocabulary, key=vocabulary.get))
    out.add_token_types([types[token == config["eos_token_id"]] for token in range(len(vocabulary))])
    gguf.SpecialVocab(source, load_merges=True).add_to_gguf(out)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in load_file(source / "model.safetensors").items():
        weight, part = values.astype(np.float32), name.split(".")[-2]
        if part in heads:  # its rotary embedding pairs neighbours, not halves
            weight = weight.reshape(heads[part], 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType[weights if weight.ndim == 2 else "F32"]
        new = names.get_name(name.removesuffix(".weight"))
        out.add_tensor(f"{new}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def open_peer(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    def write(folder: Path) -> None:
        for role in ROLES:
            convert(Path(settings["checkpoints"], role), folder / f"{role}.gguf", settings["weights"])

    folder = made_once(Path(settings["folder"], f"gguf-{settings['weights']}"), write)
    options = xllamacpp.CommonParams()
    draft = options.speculative.draft
    for part in (options, draft):
        part.cache_type_k = part.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['kv_cache']}")
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = settings["threads"]
    options.model.path = str(folder / "target.gguf")
    options.n_parallel, options.n_ctx = settings["rows"], settings["rows"] * CAPACITY
    options.cache_prompt, options.cache_ram_mib = False, 0
    if settings.get("lookup"):
        lookup, kinds = options.speculative.ngram_simple, xllamacpp.common_speculative_type
        lookup.size_n, lookup.size_m = NGRAM, settings["draft_len"]
        options.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    elif settings["draft_len"]:
        draft.mparams.path, draft.n_max = str(folder / "auxiliary.gguf"), settings["draft_len"]
        draft.n_min, draft.p_min = 0, 0.0
        options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    server = xllamacpp.Server(options)

    def answer(job: Job) -> list[tuple[int, list[int]]]:
        def one(number: int) -> tuple[int, list[int]]:
            body = {name: job[name] for name in ("temperature", "top_k", "top_p")}
            body |= {"prompt": job["prompts"][number], "n_predict": job["tokens"], "seed": job["seed"] + number}
            body |= {"ignore_eos": True, "cache_prompt": False, "return_tokens": True}
            body["samplers"] = ["temperature", "top_k", "top_p"]  # in our order, and nothing else
            address = f"{server.listening_address}/completion"  # not OpenAI's form: that one returns no token ids
            request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as reply:
                return number, json.load(reply)["tokens"]

        with ThreadPoolExecutor(job["in_flight"]) as pool:
            return list(pool.map(one, range(len(job["prompts"]))))

    return {"xllamacpp": version("xllamacpp")}, answer


if __name__ == "__main__":
    serve(open_peer)
