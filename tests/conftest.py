"""Shared fixtures: a small random pair with a real tokenizer, as checkpoints and as exported engines.

Libraries are imported where they are used: the process that only hands tests to others needs none of them.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import inspect
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from tests.support.once import once
from tests.support.paths import PAIR, ROOT

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from engines.placement import Placement
    from export.checkpoint.checkpoint import Checkpoint
    from mtad import LLM
    from tests.support.commands import Run
    from tests.support.live_server import LiveServer


SLOW_FIXTURES = {"demo_pair", "family_engine", "rtx_pair", "target_graphs"}
"""Fixtures that export; tests with one of them are slow, marked so or not."""


LONGEST = (
    *("test_cluster.py", "test_tensorrt.py", "test_install.py", "test_parallel.py", "test_families.py"),
    *("test_attention.py", "test_architectures.py", "test_model_optimizer.py", "test_server_command.py", "test_llm.py"),
    *("test_block_runner.py", "test_gpu_check.py", "test_triton.py", "test_bench.py", "test_soak.py"),
    *("test_real_models.py", "test_docs.py", "test_silence.py", "test_recorded_llm.py", "test_checkpoints.py"),
    *("test_server_page.py", "test_demo_pair.py", "test_clients.py", "test_server_strangers.py"),
)
"""Files that take more than a quarter of a minute, or wait for processes of their own; the longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule() -> None:
    """Choose Triton's interpreter where there is no GPU; it must be chosen before a test file imports Triton."""
    if "TRITON_INTERPRET" not in os.environ:
        import torch

        os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))


def pytest_itemcollected(item: pytest.Function) -> None:
    if SLOW_FIXTURES.intersection(item.fixturenames):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and go on with those that have most slow tests.

    Where several processes take file by file, all then end together.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    first = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (first.get(item.path.name, len(first)), -slow[item.path], item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own; one that hangs fails."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 240))
    return True


gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """Look for garbage rarely, and not among what was imported: else it takes up to half of a test's time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, here and in subprocesses: tests fill the cores, and more threads only wait."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def one_thread_again(one_thread: None) -> None:
    """An engine that a test before has opened may have set another number."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter, where it was chosen, without what it does over and over."""
    with pytest.MonkeyPatch.context() as patch:
        if "triton.runtime.interpreter" in sys.modules and os.environ["TRITON_INTERPRET"] == "1":
            from tests.support.interpreter import patch_once

            patch.setattr("triton.runtime.interpreter._patch_lang", patch_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the test run's own, for it and its subprocesses."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MTAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def exact_engines() -> Iterator[Callable[..., tuple[Placement, str]]]:
    """Provider `auto` is ONNX Runtime's in this process: most tests promise bits, which OpenVINO does not.

    Its value is what chooses otherwise, `choose_provider`.
    """
    from runtime import fastest

    choose = fastest.choose_provider
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "choose_provider", lambda placement, engines: (placement, ""))
        yield choose


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run for what its processes share, through `tests.support.once`."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def traced_once() -> Iterator[None]:
    """No graph is traced twice in this process; for fixtures whose checkpoints are exported."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    import export.onnx.graph
    from tests.support.traced import OPERATORS, remembered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.onnx.graph, "trace_graph", remembered(export.onnx.graph.trace_graph))
        patch.setattr(ONNXRegistry, "from_torchlib", OPERATORS)
        yield


@pytest.fixture(scope="session")
def checkpoints(shared: Path, traced_once: None) -> tuple[Path, Path]:
    """Target and auxiliary checkpoints; the auxiliary is the target with noise, and has padded embedding rows."""
    from tests.support.checkpoints import make_pair

    folder = once(shared / "checkpoints", make_pair)
    return folder / "target", folder / "auxiliary"


@pytest.fixture(scope="session")
def write_checkpoint(traced_once: None) -> Callable[..., Path]:
    """`make_checkpoint`, for tests that need one of their own."""
    from tests.support.checkpoints import make_checkpoint

    return make_checkpoint


@pytest.fixture(scope="session")
def family_checkpoint(shared: Path, traced_once: None) -> Callable[[str], Checkpoint]:
    """A random one-layer checkpoint of a family of `tests.support.families`, or a Llama with `tied` embeddings."""
    from export.checkpoint.find import find
    from tests.support.checkpoints import make_checkpoint
    from tests.support.families import FAMILIES, write_model

    def write(family: str, folder: Path) -> None:
        if family == "tied":
            make_checkpoint(folder, seed=3, num_hidden_layers=1, tie_word_embeddings=True)
        else:
            write_model(folder, FAMILIES[family](1))

    @functools.cache
    def read(family: str) -> Checkpoint:
        return find("target", str(once(shared / "families" / family, functools.partial(write, family))))

    return read


@pytest.fixture(scope="session")
def family_engine(family_checkpoint: Callable[[str], Checkpoint], shared: Path) -> Callable[[str], Path]:
    """Its engine for ONNX Runtime, in float32, of 4 rows of 256 columns."""
    from engines.folder import write_spec
    from export.onnx.graph import write_graph

    def write(family: str, folder: Path) -> None:
        folder.mkdir()
        checkpoint = family_checkpoint(family)
        spec = checkpoint.spec(4, 256, "float32", "onnx")
        write_graph(checkpoint.empty("float32"), checkpoint.weights(), spec, folder / "model.onnx")
        write_spec(folder, spec)

    return lambda family: once(shared / "family-engines" / family, functools.partial(write, family))


@pytest.fixture(scope="session")
def reference(checkpoints: tuple[Path, Path]) -> LlamaForCausalLM:
    """The target's checkpoint, run by transformers alone."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def target_graphs(checkpoints: tuple[Path, Path], shared: Path) -> dict[str, Path]:
    """Folders with a graph of the target, by form of attention, all of `tests.support.tensorrt.SPEC`."""
    from transformers import LlamaForCausalLM

    from export.onnx.graph import write_graph
    from tests.support.tensorrt import SPEC

    def write(attention: str, folder: Path) -> None:
        folder.mkdir()
        model = LlamaForCausalLM.from_pretrained(checkpoints[0]).eval()
        write_graph(model, model.state_dict().__getitem__, replace(SPEC, attention=attention), folder / "model.onnx")

    forms = ("operator", "decomposed")
    return {form: once(shared / "target-graphs" / form, functools.partial(write, form)) for form in forms}


@pytest.fixture(scope="session")
def pair_folders(checkpoints: tuple[Path, Path], shared: Path) -> Callable[[str], Path]:
    """The folder of the pair exported to a format; exported when first asked for."""
    from export.options import ExportOptions
    from export.pair import export_pair

    def write(format: str, folder: Path) -> None:
        export_pair(folder, ExportOptions(*map(str, checkpoints), rows=4, capacity=256, format=format))

    return lambda name: once(shared / "pairs" / name, functools.partial(write, name))


@pytest.fixture(scope="session")
def calibration(shared: Path) -> Path:
    """Prompts with answers, to calibrate with."""
    lines = [{"prompt": "SELECT name FROM singer WHERE age > ", "answer": f"{n} ORDER BY age"} for n in range(4)]
    return once(shared / "calibration.jsonl", lambda path: path.write_text("\n".join(map(json.dumps, lines))))


@pytest.fixture(scope="session")
def rtx_export(checkpoints: tuple[Path, Path], calibration: Path) -> Callable[..., bool]:
    """Export the pair as plans of TensorRT-RTX for a GPU, the target's with products in 8 bits; keywords override."""
    from export.options import ExportOptions
    from export.pair import export_pair

    options: dict[str, Any] = {
        "format": "tensorrt-rtx",
        "compute_capabilities": ["8.9"],
        "precision": "fp8",
        "auxiliary_precision": "float16",
        "calibration": calibration,
    }

    def export(folder: Path, **changes: Any) -> bool:
        return export_pair(
            folder, ExportOptions(*map(str, checkpoints), rows=4, capacity=256, **{**options, **changes})
        )

    return export


@pytest.fixture(scope="session")
def rtx_pair(rtx_export: Callable[..., bool], shared: Path) -> Path:
    """The pair, exported so."""
    return once(shared / "rtx" / "pair", rtx_export)


@pytest.fixture(scope="session")
def demo_pair() -> Path:
    """The demo pair, exported once into build/ and shared with the quickstart."""
    from export.options import ExportOptions
    from export.pair import export_pair

    folder = ROOT / "build" / "demo-pair"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # tests run in several processes
        target, auxiliary = (str(PAIR / name) for name in ("target", "auxiliary"))
        # writes nothing where it is up to date
        export_pair(folder, ExportOptions(target, auxiliary), overwrite=True)
    return folder


@pytest.fixture(scope="session")
def demo(demo_pair: Path) -> LLM:
    """The demo pair, opened."""
    from mtad import LLM, RuntimeConfig

    return LLM(demo_pair, RuntimeConfig(threads=1))


@pytest.fixture(scope="session", params=["onnx", pytest.param("torch", marks=pytest.mark.slow)])
def pair_folder(request: pytest.FixtureRequest, pair_folders: Callable[[str], Path]) -> Path:
    """The pair exported for each engine."""
    return pair_folders(str(request.param))


@pytest.fixture(scope="session")
def llm(pair_folder: Path) -> LLM:
    """The pair, opened; every test leaves it idle."""
    from mtad import LLM, RuntimeConfig

    return LLM(pair_folder, RuntimeConfig(threads=1, max_draft_len=8, max_beam_width=8))


@pytest.fixture(scope="session")
def plain(pair_folders: Callable[[str], Path]) -> LLM:
    """The ONNX pair, opened, without a thread or a server; every test leaves it idle, and others run on its engines."""
    from mtad import LLM, RuntimeConfig

    return LLM(pair_folders("onnx"), RuntimeConfig(threads=1, max_draft_len=8, max_beam_width=8))


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    """One server for all tests of a module that leave it as it was."""
    from tests.support.live_server import live
    from tests.support.waiting import own

    with live(own(plain, max_waiting=64)) as running:
        yield running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""
    from runtime.commands.main import COMMANDS
    from tests.support.commands import Outcome

    def call(name: str, *arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "argv", [f"mtad {name}", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        code = 0
        try:
            importlib.import_module(COMMANDS[name][0]).main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture
def idle_afterwards(llm: LLM) -> Iterator[None]:
    """Whatever a test did, finished or refused, nothing is left behind."""
    from tests.support.integrity import check_loop

    yield
    check_loop(llm.loop)
    assert llm.loop.scheduler.idle
