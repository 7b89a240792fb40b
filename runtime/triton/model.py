"""Triton's Python model. Imported by the `model.py` of a model directory, inside Triton's Python backend only."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from mtad.errors import InvalidInput
from runtime.async_llm import AsyncLLM
from runtime.config import use_torch
from runtime.server.errors import ApiError
from runtime.server.metrics import Metrics
from runtime.triton.options import read_options
from runtime.triton.service import TritonService

_CODES = {400: "INVALID_ARG", 499: "CANCELLED", 500: "INTERNAL"}
"""Triton's codes of HTTP statuses, which the errors have; all others are UNAVAILABLE: try again, or elsewhere."""


class TritonSender:
    """Sends one request's responses through Triton. Used by the service's thread only; nothing follows the last one."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._ended = False

    @property
    def cancelled(self) -> bool:
        return not self._ended and bool(self._sender.is_cancelled())

    def send(self, tensors: dict[str, NDArray[Any]], last: bool) -> None:
        outputs = [pb_utils.Tensor(name, value) for name, value in tensors.items()]
        self._sender.send(pb_utils.InferenceResponse(output_tensors=outputs))
        if last:  # told apart: Triton's sender closes at the end, be there room in shared memory for outputs or not
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._ended = True

    def fail(self, error: ApiError) -> None:
        if self._ended:
            return
        self._ended = True
        kinds = pb_utils.TritonError  # the stub puts it there after it has imported this file
        shown = kinds(error.message, getattr(kinds, _CODES.get(error.status, "UNAVAILABLE")))
        response = pb_utils.InferenceResponse(error=shown)
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class TritonMetrics:
    """Copies the gauges and counters of `runtime.server.metrics` to Triton's own metrics, which have no histograms.

    Triton's metric objects are not safe for two threads at once (the server dies); one thread makes and updates them.
    """

    def __init__(self, engine: AsyncLLM, model: str) -> None:
        self._source, self._model = Metrics(engine, model), model
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, list[float]]] = {}

    def update(self) -> None:
        make = pb_utils.MetricFamily
        kinds = {"gauge": make.GAUGE, "counter": make.COUNTER}
        for family in self._source.collect():
            for sample in family.samples if family.type in kinds else ():
                labels = {"model": self._model, **sample.labels}
                key = sample.name, tuple(sorted(labels.items()))
                if sample.name not in self._families:
                    own = make(name=sample.name, description=family.documentation, kind=kinds[family.type])
                    self._families[sample.name] = own
                if key not in self._metrics:
                    self._metrics[key] = self._families[sample.name].Metric(labels=labels), [0.0]
                metric, last = self._metrics[key]
                if family.type == "gauge":
                    metric.set(sample.value)
                elif sample.value > last[0]:
                    metric.increment(sample.value - last[0])
                last[0] = sample.value


class TritonPythonModel:
    """What Triton calls; one object in one process, whatever the number of requests."""

    def initialize(self, args: dict[str, str]) -> None:
        use_torch()
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            options = read_options(folder / "model.yaml")
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            engine = AsyncLLM(folder / options.pair, options)
        except InvalidInput as error:
            raise pb_utils.TritonModelException(str(error)) from None
        metrics = TritonMetrics(engine, args["model_name"])
        self._service = TritonService(engine, options.request_seconds, metrics.update)
        self._service.start()
        while engine.state == "open" and not engine.ready:  # Triton calls the model ready when this returns
            time.sleep(0.01)
        if engine.cause is not None:
            raise pb_utils.TritonModelException(f"the engine stopped: {engine.cause}")

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine; responses are sent by the service's thread, so this returns at once."""
        for request in requests:
            sender = TritonSender(request)
            try:
                self._service.submit(_tensors(request), sender)
            except Exception as error:  # whatever it is, the client gets it, and other requests go on
                self._service.refuse(error, sender)

    def is_ready(self) -> bool:
        """Whether the engine goes on; newer releases of Triton ask, for their health as well."""
        return self._service.engine.ready

    def finalize(self) -> None:
        """Stop the engine; Triton has waited for the requests."""
        self._service.stop()


def _tensors(request: Any) -> dict[str, NDArray[Any]]:
    """Copies of a request's tensors: Triton takes their memory back.

    Its generate extension makes a parameter of each field of a body that is no input, such as a misspelt one.
    """
    for name, value in json.loads(request.parameters() or "{}").items():
        raise InvalidInput(name, value, "no such input; the model's configuration lists them")
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
