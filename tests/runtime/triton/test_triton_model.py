"""The parts of the Triton model that need no server: tensors, `model.yaml`, the directory, the service's thread."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from mtad import LLM, AsyncLLM, RuntimeConfig
from mtad.errors import Failed, InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import given_options
from runtime.commands.triton import parser
from runtime.server.errors import ApiError
from runtime.triton.options import TritonOptions, read_options
from runtime.triton.repository import write_model
from runtime.triton.request import read
from runtime.triton.service import TritonService
from runtime.triton.tensors import INPUTS, OUTPUTS
from tests.support.commands import Run
from tests.support.integrity import check_engine
from tests.support.waiting import PATIENCE, Deadlines, Gate, own, until

DEFAULTS = DecodingParams()
TWO = np.array([[2]])


def text(*values: str) -> Any:
    return np.array([[value.encode() for value in values]], np.object_)


def test_every_decoding_parameter_is_an_input_under_one_name_or_more() -> None:
    assert {one.field for one in INPUTS if one.role == "parameter"} == {one.name for one in fields(DecodingParams)}
    for tensors in (INPUTS, OUTPUTS):
        assert len({one.name for one in tensors}) == len(tensors)


def test_a_32_bit_float_is_the_decimal_that_was_meant() -> None:
    for value in (0.7, 0.1, 1e-3, 1.0, 0.85):
        tensors = {"text_input": text("x"), "temperature": np.array([[max(value, 0.1)]], np.float32)}
        question = read(tensors, DEFAULTS, (0,))
        assert question.params.temperature == max(value, 0.1)


def test_what_a_request_leaves_out_is_the_pairs() -> None:
    defaults = DecodingParams(max_tokens=7, temperature=0.5, stop="x")
    question = read({"text_input": text("prompt")}, defaults, (0,))
    assert (question.prompt, question.params) == ("prompt", defaults)
    assert not question.settings.stream


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({"max_tokens": np.array([[5]], np.int32)}, "text_input"),
        ({"text_input": text("a"), "accept_threshold": np.array([[-1.0]], np.float32)}, "accept_threshold"),
        ({"text_input": text("a"), "stop": text("a"), "stop_words": text("b")}, "stop_words"),
        ({"text_input": text("a"), "return_context_logits": np.array([[True]])}, "return_context_logits"),
        ({"text_input": text("a", "b")}, "text_input"),
        ({"text_input": np.array([[b"\xff"]], np.object_)}, "text_input"),
        ({"text_input": text("a"), "temperature": np.zeros((1, 2), np.float32)}, "temperature"),
        ({"text_input": text("a"), "temperature": np.array([[np.nan]], np.float32)}, "temperature"),
        ({"text_input": text("a"), "num_return_sequences": np.array([[2000]], np.int32)}, "num_return_sequences"),
        ({"text_input": text("a"), "json_schema": text("{}"), "regex": text("a")}, "grammar"),
        ({"text_input": text("a"), "input_ids": np.array([[1]], np.int32)}, "text_input"),
        ({"text_input": text("a"), "logit_bias": text("{")}, "logit_bias"),
        ({"text_input": text("a"), "logit_bias": text("[" * 50_000)}, "logit_bias"),
        ({"text_input": text("a"), "bad_words": text(*[""] * 100_000)}, "bad_words"),
        ({"text_input": text("a"), "num_draft_tokens": TWO, "draft_len": TWO}, "num_draft_tokens"),
    ],
)
def test_an_unusable_tensor_is_named(tensors: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        read(tensors, DEFAULTS, (0,))


def test_a_million_ids_hold_up_the_loop_that_reads_them_for_no_longer_than_a_list_takes() -> None:
    ids = np.arange(1_000_000, dtype=np.int32)
    began = time.process_time()
    assert read({"input_ids": ids}, DEFAULTS, (0,)).prompt == tuple(range(1_000_000))
    assert time.process_time() - began < 1


def test_model_yaml_has_every_option_of_the_engine(tmp_path: Path, pair_folders: Callable[[str], Path]) -> None:
    pair = pair_folders("onnx")
    folder = write_model(tmp_path, "small", TritonOptions(pair=str(pair), rows=2, graphs=False))
    values = yaml.safe_load((folder / "1" / "model.yaml").read_text())
    assert set(values) == {"pair", "request_seconds", *asdict(RuntimeConfig())}
    options = read_options(folder / "1" / "model.yaml")
    assert options == TritonOptions(pair=str(pair), rows=2, graphs=False)
    llm = LLM(pair, options)
    assert llm.loop.scheduler.max_waiting == RuntimeConfig().max_waiting


def test_the_command_has_every_option_of_the_engine() -> None:
    config = given_options(parser().parse_args(["pair", "repository", "--no-graphs", "--rows", "3"]), RuntimeConfig)
    assert config == {"graphs": False, "rows": 3}
    shown = {action.dest for action in parser()._actions}
    assert shown >= {field.name for field in fields(RuntimeConfig)} - {"tensor_parallel"}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("pair: x\nrowz: 4\n", "rowz"),
        ("pair: x\nrows: many\n", "rows"),
        ("pair: x\nrequest_seconds: 0\n", "request_seconds"),
        ("rows: 4\n", "pair"),
        ("- pair\n", "model.yaml"),
    ],
)
def test_a_wrong_option_is_named(content: str, field: str, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(content)
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        read_options(file)


def test_a_directory_is_replaced_only_where_it_is_ours_and_that_is_asked(
    tmp_path: Path, pair_folders: Callable[[str], Path]
) -> None:
    options = TritonOptions(pair=str(pair_folders("onnx")))
    folder = write_model(tmp_path, "mtad", options)
    with pytest.raises(InvalidInput, match="--overwrite"):
        write_model(tmp_path, "mtad", options)
    write_model(tmp_path, "mtad", replace(options, rows=2), overwrite=True)
    assert read_options(folder / "1" / "model.yaml").rows == 2
    (tmp_path / "theirs" / "1").mkdir(parents=True)
    with pytest.raises(InvalidInput, match="exists"):
        write_model(tmp_path, "theirs", options, overwrite=True)


def test_a_pair_that_lies_in_the_directory_is_not_deleted_with_it(
    tmp_path: Path, pair_folders: Callable[[str], Path]
) -> None:
    folder = write_model(tmp_path, "mtad", TritonOptions(pair=str(pair_folders("onnx"))), copy=True)
    inside = TritonOptions(pair=str(folder / "1" / "pair"), rows=2)
    with pytest.raises(InvalidInput, match="give --copy"):
        write_model(tmp_path, "mtad", inside, overwrite=True)
    write_model(tmp_path, "mtad", inside, copy=True, overwrite=True)
    assert (folder / "1" / "pair" / "pair.json").is_file()


def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, pair_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TritonOptions(pair=str(pair_folders("onnx")))
    folder = write_model(tmp_path, "mtad", options)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError("disk full")))
    for name in ("mtad", "new"):
        with pytest.raises(Failed, match="disk full"):
            write_model(tmp_path, name, options, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mtad"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_copy_can_be_moved(tmp_path: Path, pair_folders: Callable[[str], Path]) -> None:
    written = write_model(tmp_path / "here", "mtad", TritonOptions(pair=str(pair_folders("onnx"))), copy=True)
    moved = written.rename(tmp_path / "there")
    options = read_options(moved / "1" / "model.yaml")
    assert not Path(options.pair).is_absolute()
    assert LLM(moved / "1" / options.pair, RuntimeConfig(threads=1)).pair.vocab_size > 0


def test_the_command_writes_a_directory(tmp_path: Path, pair_folders: Callable[[str], Path], run: Run) -> None:
    given = pair_folders("onnx"), tmp_path / "models", "--model", "small", "--rows", 3
    folder = Path(run("triton", *given).out.strip())
    assert folder == tmp_path / "models" / "small"
    config = (folder / "config.pbtxt").read_text()
    assert re.search(r"decoupled: true", config)
    assert 'name: "small"' in config
    assert read_options(folder / "1" / "model.yaml").rows == 3


class Recorder:
    """A client: what it was sent, and whether it has given up."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.error: ApiError | None = None
        self.cancelled = False
        self.ended = threading.Event()

    def send(self, tensors: dict[str, Any], last: bool) -> None:
        self.parts.append(tensors)
        if last:
            self.ended.set()

    def fail(self, error: ApiError) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()


LONG = {
    "text_input": text("SELECT"),
    "method": text("sample"),
    "max_tokens": np.array([[150]], np.int32),
    "ignore_eos": np.array([[True]]),
    "stream": np.array([[True]]),
}


@contextmanager
def serving(plain: LLM, seconds: float) -> Iterator[tuple[TritonService, Gate]]:
    """A service that runs, and is sound in the end; its engine waits before each pass until a test lets it go on."""
    llm = own(plain)
    gate, service = Gate(llm), TritonService(AsyncLLM(llm), request_seconds=seconds)
    service.start()
    try:
        yield service, gate
    finally:
        if service.engine.state != "stopped":
            service.stop()
    check_engine(service.engine)


def test_a_request_beyond_its_time_ends_with_an_error_and_frees_its_row(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines()
    monkeypatch.setattr("runtime.triton.service.asyncio", deadlines)
    with serving(plain, 0.4) as (service, gate):
        client: Any = Recorder()
        service.submit(LONG, client)
        gate.let(1)
        until(lambda: bool(client.parts))  # what was ready in time was sent
        deadlines.end(0.4)
        assert client.ended.wait(PATIENCE)
        assert client.error
        assert client.error.status == 504
        gate.open()
        until(lambda: service.engine.statistics()["running"] == 0)


def test_stopping_ends_every_request_with_an_answer(plain: LLM) -> None:
    clients: list[Any] = [Recorder() for _ in range(6)]
    with serving(plain, 2 * PATIENCE) as (service, gate):
        for client in clients:
            service.submit(LONG, client)
        gate.let(1)
        until(lambda: any(client.parts for client in clients))
        until(lambda: gate.holds)  # else it may have stopped before anything saw it cancel
        stopping = threading.Thread(target=service.stop)
        stopping.start()
        until(lambda: service.engine.state == "cancelling")
        gate.open()
        stopping.join()
        assert all(client.ended.is_set() for client in clients)
        assert all(client.error and client.error.status == 503 for client in clients)


def test_a_client_that_gives_up_while_it_waits_costs_no_other_its_place(plain: LLM) -> None:
    with serving(plain, 2 * PATIENCE) as (service, gate):
        clients: list[Any] = [Recorder() for _ in range(8)]
        for client in clients:
            service.submit({**LONG, "max_tokens": np.array([[40]], np.int32)}, client)
        until(lambda: service.engine.statistics()["running"] + service.engine.statistics()["waiting"] == 8)
        clients[6].cancelled = True
        assert clients[6].ended.wait(PATIENCE)
        gate.open()
        for client in clients:
            assert client.ended.wait(PATIENCE)
        assert clients[6].error
        assert clients[6].error.status == 499
        assert not clients[6].parts
        assert all(client.error is None for client in clients[:6] + clients[7:])


def test_a_request_cancelled_before_it_began_is_answered_all_the_same(plain: LLM) -> None:
    """Triton unloads a model only when every request had its last response."""
    with serving(plain, 60) as (service, _):
        client: Any = Recorder()

        def begin_and_cancel() -> None:
            service._begin(LONG, client)
            for task in service._open:
                task.cancel()

        service._loop.call_soon_threadsafe(begin_and_cancel)
        assert client.ended.wait(PATIENCE)
        assert client.error
        assert client.error.status == 499
