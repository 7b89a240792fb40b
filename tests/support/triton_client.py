"""The official gRPC client, one streaming call at a time."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.triton.tensors import INPUTS
from tests.support.triton_server import TritonServer  # first: it says where the client lies

import tritonclient.grpc as triton  # isort: skip
from tritonclient.utils import np_to_triton_dtype  # isort: skip

_NUMPY = {"STRING": np.object_, "FP32": np.float32, "INT32": np.int32, "UINT64": np.uint64, "BOOL": np.bool_}


class Call:
    """Responses to what was asked over one stream; iteration ends with the last response, or raises its error."""

    def __init__(self, server: TritonServer) -> None:
        self._client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, model: str, **values: Any) -> None:
        types = {tensor.name: tensor.type for tensor in INPUTS}
        tensors = []
        for name, value in values.items():
            items = value if isinstance(value, list) else [value]
            items = [one.encode() if isinstance(one, str) else one for one in items]
            array: NDArray[Any] = np.array([items], _NUMPY[types[name]])
            tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        self._client.async_stream_infer(model, tensors, enable_empty_final_response=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            result, error = self._answers.get(timeout=240)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield {one.name: result.as_numpy(one.name)[0] for one in response.outputs}
            if response.parameters["triton_final_response"].bool_param:
                return

    def cancel(self) -> None:
        """Give up whatever has not been answered."""
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


@contextmanager
def calling(server: TritonServer) -> Iterator[Call]:
    """A stream, closed in the end."""
    call = Call(server)
    try:
        yield call
    finally:
        call.close()


def ask(server: TritonServer, model: str = "mtad", **values: Any) -> list[dict[str, Any]]:
    """All responses to one request."""
    with calling(server) as call:
        call.ask(model, **values)
        return list(call)
