"""Shared fixtures: a small random pair with a real tokenizer, as checkpoints and as exported engines."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from runtime import RuntimeConfig
from scripts.paths import DEMO, ROOT

# before anything imports Triton: kernels are then made for its interpreter
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engines.folder import write_spec
from export.checkpoint.checkpoint import Checkpoint, find
from export.checkpoint.weights import model_weights
from export.onnx.graph import write_graph
from export.pair import export_pair
from export.plan import ExportOptions
from runtime import LLM

if TYPE_CHECKING:
    from tests.support.live_server import LiveServer

TEXT = [
    "SELECT name FROM singer WHERE age > 20 ORDER BY age DESC LIMIT 1",
    "def largest(values): return max(values)  # of the list",
    "How many singers are older than twenty, and where do they live? Ωμέγα naïve 日本語",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def make_checkpoint(folder: Path, seed: int, padding: int = 0, **changes: int) -> Path:
    """A random Llama checkpoint. Its logits are scaled up so that distributions are far from uniform."""
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer) + padding,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the test run's own, for it and its subprocesses."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MTAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and auxiliary checkpoints; the auxiliary is the target with noise, and has padded embedding rows."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target = make_checkpoint(folder / "target", seed=1)
    auxiliary = make_checkpoint(folder / "auxiliary", seed=1)
    model = LlamaForCausalLM.from_pretrained(auxiliary)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.std() * 0.15 * torch.randn(parameter.shape, generator=generator))
        model.resize_token_embeddings(model.config.vocab_size + 20)
    model.save_pretrained(auxiliary)
    return target, auxiliary


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """`make_checkpoint`, for tests that need one of their own."""
    return make_checkpoint


@pytest.fixture(scope="session")
def family_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A random one-layer checkpoint of a family of `tests.export.test_families`, or a Llama with `tied` embeddings."""
    from tests.export.test_families import FAMILIES, write_model

    parent = tmp_path_factory.mktemp("families")

    @functools.cache
    def write(family: str) -> Checkpoint:
        if family == "tied":
            make_checkpoint(parent / family, seed=3, num_hidden_layers=1, tie_word_embeddings=True)
        else:
            write_model(parent / family, FAMILIES[family](1))
        return find("target", str(parent / family))

    return write


@pytest.fixture(scope="session")
def family_engine(
    family_checkpoint: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Its engine for ONNX Runtime, in float32, of 4 rows of 256 columns."""
    parent = tmp_path_factory.mktemp("family-engines")

    @functools.cache
    def write(family: str) -> Path:
        checkpoint, folder = family_checkpoint(family), parent / family
        folder.mkdir()
        spec = checkpoint.spec(4, 256, "float32", "onnx")
        write_graph(checkpoint.empty("float32"), checkpoint.weights(), spec, folder / "model.onnx")
        write_spec(folder, spec)
        return folder

    return write


@pytest.fixture(scope="session")
def reference(checkpoints: tuple[Path, Path]) -> LlamaForCausalLM:
    """The target's checkpoint, run by transformers alone."""
    return LlamaForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def target_graphs(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a graph of the target, by form of attention, all of `tests.engines.tensorrt.test_tensorrt.SPEC`."""
    from tests.engines.tensorrt.test_tensorrt import SPEC

    folders = {}
    for attention in ("operator", "decomposed"):
        folders[attention] = tmp_path_factory.mktemp(attention)
        model = LlamaForCausalLM.from_pretrained(checkpoints[0]).eval()
        write_graph(model, model_weights(model), replace(SPEC, attention=attention), folders[attention] / "model.onnx")
    return folders


@pytest.fixture(scope="session")
def pair_folders(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the pair exported to a format; exported when first asked for."""
    parent = tmp_path_factory.mktemp("pairs")
    target, auxiliary = map(str, checkpoints)

    @functools.cache
    def folder(format: str) -> Path:
        export_pair(parent / format, ExportOptions(target, auxiliary, rows=4, capacity=256, format=format))
        return parent / format

    return folder


@pytest.fixture(scope="session")
def demo_pair() -> Path:
    """The demo pair, exported once into build/ and shared with the quickstart."""
    folder, checkpoints = ROOT / "build" / "demo-pair", DEMO / "pair"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # tests run in several processes
        defaults = json.loads((DEMO / "tuned.json").read_text())["defaults"]
        target, auxiliary = (str(checkpoints / name) for name in ("target", "auxiliary"))
        # writes nothing where it is up to date
        export_pair(folder, ExportOptions(target, auxiliary, defaults=defaults), overwrite=True)
    return folder


@pytest.fixture(scope="session", params=["onnx", "torch"])
def pair_folder(request: pytest.FixtureRequest, pair_folders: Callable[[str], Path]) -> Path:
    """The pair exported for each engine."""
    return pair_folders(str(request.param))


@pytest.fixture(scope="session")
def llm(pair_folder: Path) -> LLM:
    """The pair, opened; every test leaves it idle."""
    return LLM(pair_folder, RuntimeConfig(threads=1))


@pytest.fixture(scope="session")
def plain(pair_folders: Callable[[str], Path]) -> LLM:
    """The ONNX pair, opened, without a thread or a server; every test leaves it idle, and others run on its engines."""
    return LLM(pair_folders("onnx"), RuntimeConfig(threads=1))


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    """One server for all tests of a module that leave it as it was."""
    from tests.support.live_server import COSTS, live

    with live(LLM(plain.pair, RuntimeConfig(max_waiting=64), costs=COSTS)) as running:
        yield running


@pytest.fixture
def idle_afterwards(llm: LLM) -> Iterator[None]:
    """Whatever a test did, finished or refused, nothing is left behind."""
    yield
    llm.loop.check_integrity()
    assert llm.loop.scheduler.idle
