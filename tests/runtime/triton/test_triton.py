"""The Triton model in a real Triton server: over gRPC and HTTP it answers what the engine gives."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtad import LLM, DecodingParams
from runtime.scheduler.request import Result
from runtime.triton.options import TritonOptions
from runtime.triton.repository import write_model
from tests.support.held import Hold
from tests.support.triton_client import ask, calling
from tests.support.triton_server import TritonServer, make_backends, make_environment
from tests.support.waiting import PATIENCE, STARTING, until

PROMPT = "def largest(values):\n"
PROMPTS = [PROMPT, "SELECT name FROM singer WHERE", "class Stack:\n    def push(self", "# naïve 日本\n", "import"]
LONG = {"text_input": PROMPT, "method": "sample", "max_tokens": 900, "ignore_eos": True}
GENERATE = "/v2/models/mtad/generate"


class Place:
    """A repository, and what a server needs around it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repository, self._logs = folder, folder / "models", itertools.count()
        self.hold = Hold(folder / "hold")
        self.environment, self.backends = make_environment(folder / "python"), make_backends(folder / "backends")

    def write(self, name: str, pair: Path, **engine: Any) -> None:
        options = TritonOptions(pair=str(pair), provider="cpu", threads=1, prefix_tokens=0, **engine)
        write_model(self.repository, name, options, str(self.environment))

    def serve(self, *models: str) -> TritonServer:
        return TritonServer(self.repository, self.backends, self.folder / f"log{next(self._logs)}", self.hold, *models)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_pair: Path, pair_folders: Callable[[str], Path]) -> Place:
    place = Place(tmp_path_factory.mktemp("triton"))
    place.write("mtad", demo_pair, rows=4, max_waiting=32)
    place.write("tensorrt_llm", pair_folders("onnx"))
    return place


@pytest.fixture(scope="module")
def server(place: Place) -> Iterator[TritonServer]:
    """One server with two models, for all tests that leave it as it was."""
    running = place.serve("mtad", "tensorrt_llm")
    try:
        running.wait()
        until(lambda: any(shown.startswith("mtad_phase_seconds") and 'mtad"' in shown for shown in figures(running)))
        yield running
        assert running.stop() == 0, running.log[-4000:]
        until(lambda: not running.processes())
        assert "Traceback" not in running.log
    finally:
        running.kill()


def expected(llm: LLM, prompt: Any, **values: Any) -> Result:
    return llm.generate(prompt, DecodingParams.from_dict(values, llm.pair.defaults))[0]


def figures(server: TritonServer) -> dict[str, float]:
    """Triton's metrics that are ours, by name and labels."""
    text = server.call("GET", "/metrics", port=server.metrics)[1]
    return {name: float(value) for name, value in re.findall(r"^(mtad_\S+) (\S+)$", text, re.MULTILINE)}


def figure(server: TritonServer, name: str, **labels: str) -> float:
    """One of the model `mtad`."""
    shown = ",".join(f'{key}="{value}"' for key, value in sorted({"model": "mtad", **labels}.items()))
    return figures(server)[f"{name}{{{shown}}}"]


def total(server: TritonServer, name: str) -> float:
    """Sum over its labels, of the model `mtad`."""
    return sum(value for shown, value in figures(server).items() if shown.startswith(name) and 'model="mtad"' in shown)


@pytest.mark.parametrize("method", ["block", "mmtad"])
def test_generate_answers_what_the_engine_gives(method: str, demo: LLM, server: TritonServer) -> None:
    asked = {"method": method, "seed": 7, "max_tokens": 24, "temperature": 0.7, "top_p": 0.85, "draft_len": 4}
    result = expected(demo, PROMPT, **asked)
    status, answer = server.call(
        "POST",
        GENERATE,
        {"text_input": PROMPT, "return_log_probs": True, "return_token_ids": True, **asked},
    )
    assert status == 200, answer
    assert answer["text_output"] == result.text
    assert answer["output_ids"] == result.token_ids
    assert answer["output_log_probs"] == pytest.approx(result.logprobs, rel=1e-6), "32-bit floats of the same numbers"
    assert answer["cum_log_probs"] == pytest.approx(sum(result.logprobs), rel=1e-6)
    assert answer["finish_reason"] == result.finish_reason
    assert answer["acceptance_rate"] == pytest.approx(result.statistics.acceptance_rate)
    assert answer["block_efficiency"] == pytest.approx(result.statistics.block_efficiency)
    assert answer["total_draft_tokens"] == result.statistics.drafted
    assert answer["total_accepted_draft_tokens"] == result.statistics.accepted
    assert answer["output_seed"] == 7


def test_generate_stream_sends_a_response_a_block(demo: LLM, server: TritonServer) -> None:
    result = expected(demo, PROMPT, seed=3, max_tokens=40)
    status, text = server.call(
        "POST", f"{GENERATE}_stream", {"text_input": PROMPT, "stream": True, "seed": 3, "max_tokens": 40}
    )
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == result.text
    assert len(events) >= result.statistics.target_passes > 5
    assert ["finish_reason" in event for event in events] == [False] * (len(events) - 1) + [True]


def test_concurrent_grpc_clients_share_blocks_and_get_what_they_get_alone(
    demo: LLM, place: Place, server: TritonServer
) -> None:
    """Twelve streams of different methods and lengths, on four rows."""
    methods = ["mtad", "sample", "speculative", "mmtad"]
    asked: list[dict[str, Any]] = [
        {"method": methods[index % 4], "seed": index, "max_tokens": 24 + 4 * index, "draft_len": 4}
        for index in range(12)
    ]
    prompts = [PROMPTS[index % 5] for index in range(12)]
    results = [expected(demo, prompt, **values) for prompt, values in zip(prompts, asked, strict=True)]
    before, ended = figure(server, "mtad_blocks_total"), total(server, "mtad_requests_total")
    answers: dict[int, list[dict[str, Any]]] = {}

    def one(index: int) -> None:
        answers[index] = ask(
            server, text_input=prompts[index], stream=True, return_token_ids=True, return_log_probs=True, **asked[index]
        )

    threads = [threading.Thread(target=one, args=(index,)) for index in range(12)]
    with place.hold(4 * PATIENCE):
        for thread in threads:
            thread.start()
        until(lambda: figure(server, "mtad_requests_running") + figure(server, "mtad_queue_length") == 12)
    for thread in threads:
        thread.join(2 * PATIENCE)
    for index, result in enumerate(results):
        parts = answers[index]
        assert b"".join(part["text_output"][0] for part in parts).decode() == result.text
        assert [int(token) for part in parts for token in part["output_ids"][0]] == result.token_ids
        assert parts[-1]["cum_log_probs"][0] == pytest.approx(sum(result.logprobs), rel=1e-5)
        assert parts[-1]["finish_reason"][0].decode() == result.finish_reason
    passes = sum(result.statistics.target_passes for result in results)
    until(lambda: total(server, "mtad_requests_total") >= ended + 12)  # more where an earlier one was counted late
    blocks = figure(server, "mtad_blocks_total") - before
    assert blocks < 0.6 * passes, f"{passes} passes of rows in {blocks} blocks: hardly batched"


def test_n_choices_are_one_answer_or_a_stream_of_numbered_parts(demo: LLM, server: TritonServer) -> None:
    params = DecodingParams.from_dict({"n": 3, "seed": 5, "max_tokens": 16}, demo.pair.defaults)
    results = demo.generate(PROMPT, params)
    asked: dict[str, Any] = {
        "text_input": PROMPT,
        "num_return_sequences": 3,
        "seed": 5,
        "max_tokens": 16,
        "return_token_ids": True,
    }
    (whole,) = ask(server, **asked)
    assert [text.decode() for text in whole["text_output"]] == [result.text for result in results]
    assert whole["sequence_index"].tolist() == [0, 1, 2]
    assert whole["output_seed"].tolist() == [result.seed for result in results]
    for ids, result in zip(whole["output_ids"].tolist(), results, strict=True):
        assert ids == result.token_ids + [-1] * (len(ids) - len(result.token_ids))
    texts = ["", "", ""]
    for part in ask(server, stream=True, **asked):
        texts[part["sequence_index"][0]] += part["text_output"][0].decode()
    assert texts == [result.text for result in results]


def test_token_ids_guides_and_settings_are_honoured(demo: LLM, server: TritonServer) -> None:
    ids = demo.pair.tokenizer(PROMPT).input_ids
    asked: dict[str, Any] = {"seed": 1, "max_tokens": 12}
    result = expected(demo, ids, **asked)
    _, answer = server.call("POST", GENERATE, {"input_ids": ids, "exclude_input_in_output": False, **asked})
    assert answer["text_output"] == PROMPT + result.text
    flags = {"return_perf_metrics": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    _, answer = server.call("POST", GENERATE, {"text_input": PROMPT, "top_logprobs": 2, **flags, **asked})
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (len(ids), len(result.token_ids))
    assert json.loads(answer["statistics"])["tokens"] == len(result.token_ids)
    alternatives = json.loads(answer["output_top_logprobs"])
    assert [len(one) for one in alternatives] == [2] * len(result.token_ids)
    _, answer = server.call("POST", GENERATE, {"text_input": PROMPT, "regex": "[0-9]{3}"})
    assert re.fullmatch("[0-9]{3}", answer["text_output"])
    neutral = {"bad_words": ["zebra", ""], "length_penalty": 1.0, "end_id": demo.pair.eos[0], "pad_id": 0}
    drafting = expected(demo, PROMPT, method="sample", stop=("return",), **asked)
    values = {"num_draft_tokens": 0, "stop_words": ["return"], **neutral, **asked}
    _, answer = server.call("POST", GENERATE, {"text_input": PROMPT, **values})
    assert answer["text_output"] == drafting.text
    assert answer["total_draft_tokens"] == 0


@pytest.mark.parametrize("values", [{"temprature": 1}, {"end_id": 12345}])
def test_bad_input_is_an_error_that_names_the_field(values: dict[str, int], server: TritonServer) -> None:
    ((name, value),) = values.items()
    asked = {"text_input": "x", **values}
    status, answer = server.call("POST", GENERATE, asked)
    assert (status, f"{name} = {value}" in answer["error"]) == (400, True)
    status, text = server.call("POST", f"{GENERATE}_stream", {**asked, "stream": True})
    assert (status, f"{name} = {value}" in text) == (400, True)


def test_bad_input_over_grpc_ends_its_own_request_only(server: TritonServer) -> None:
    from tritonclient.utils import InferenceServerException

    with calling(server) as call:
        call.ask("mtad", text_input=PROMPT, temperature=-1.0)
        with pytest.raises(InferenceServerException, match=r"temperature = -1\.0: "):
            list(call)
        call.ask("mtad", text_input=[PROMPT], max_tokens=4, ignore_eos=True, return_num_output_tokens=True)
        (answer,) = call
    assert answer["num_output_tokens"] == [4]


def test_a_cancelled_stream_frees_its_row(place: Place, server: TritonServer) -> None:
    until(lambda: figure(server, "mtad_requests_running") == 0)
    cancelled = figure(server, "mtad_requests_total", reason="cancelled")
    with calling(server) as call, calling(server) as waiting:
        with place.hold(0.2):  # so that 900 passes outlast whatever Triton needs
            for _ in range(4):  # every row
                call.ask("mtad", stream=True, **LONG)
            until(lambda: figure(server, "mtad_requests_running") == 4)
            waiting.ask("mtad", text_input=PROMPT, max_tokens=8, ignore_eos=True)
            until(lambda: figure(server, "mtad_queue_length") == 1)
            call.cancel()
            (answer,) = waiting
        assert answer["finish_reason"][0] == b"length"
        until(lambda: figure(server, "mtad_requests_total", reason="cancelled") == cancelled + 4)
        until(lambda: figure(server, "mtad_requests_running") == 0)


def test_a_full_queue_is_unavailable_and_not_a_loss(place: Place, server: TritonServer) -> None:
    from tritonclient.utils import InferenceServerException

    served, refused = 0, list[str]()
    with calling(server) as call:

        def read() -> int:
            try:
                return sum(len(answer["text_output"]) for answer in call)
            except InferenceServerException as error:
                refused.append(str(error))
                return 0

        with place.hold(4 * PATIENCE):
            for _ in range(50):  # 4 rows, 32 places
                call.ask(
                    "mtad", text_input=PROMPT, method="sample", max_tokens=8, ignore_eos=True, num_return_sequences=8
                )
            served += read()
            assert refused
        for _ in range(49):
            served += read()
    assert all("wait" in message for message in refused)
    assert served == 8 * (50 - len(refused)) > 0


def test_a_restarted_server_answers_the_same_and_a_dead_model_can_be_loaded_again(
    place: Place, server: TritonServer
) -> None:
    asked = {"text_input": "SELECT", "max_tokens": 8, "seed": 1}
    path = "/v2/models/tensorrt_llm/generate"
    first = server.call("POST", path, asked)
    again = place.serve("tensorrt_llm")
    try:
        again.wait()
        assert again.call("POST", path, asked) == first
        (process,) = again.processes()
        os.kill(process, signal.SIGKILL)

        def refused() -> bool:
            with contextlib.suppress(ConnectionError):  # calls that meet the end may get no answer at all
                return again.call("POST", path, asked)[0] == 400
            return False

        until(refused)
        assert "not healthy" in again.call("POST", path, asked)[1]["error"]
        for step in ("unload", "load"):
            status, answer = again.call("POST", f"/v2/repository/models/tensorrt_llm/{step}", {})
            assert status == 200, answer
        until(lambda: again.call("POST", path, asked) == first, STARTING)
    finally:
        again.kill()
    until(lambda: not again.processes())
