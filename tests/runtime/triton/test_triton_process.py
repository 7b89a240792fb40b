"""What Triton calls, on a stand-in for the module that only its own process has."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from runtime.server.errors import ApiError


def test_a_last_response_that_finds_no_room_ends_in_an_error_and_a_broken_engine_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's sender closes when it is told of the end, before it stores the outputs (`response_sender.cc`)."""
    sent, final = list[Any](), 1

    class Sender:
        closed = False

        def send(self, response: Any = None, flags: int = 0) -> None:
            assert not self.closed, "Response sender has been closed"
            self.closed = flags == final
            if response and "error" not in response:
                raise MemoryError("no room in shared memory")
            sent.append((response, flags))

    utils: Any = ModuleType("triton_python_backend_utils")
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL, utils.InferenceResponse = final, dict
    utils.Tensor, utils.TritonError = (lambda *given: given), Mock(side_effect=lambda message, code: message)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    model = importlib.import_module("runtime.triton.model")
    monkeypatch.delitem(sys.modules, model.__name__)
    sender = model.TritonSender(Mock(get_response_sender=Sender))
    with pytest.raises(MemoryError):
        sender.send({"text_output": np.array([b"x"])}, last=True)
    sender.fail(ApiError(500, "no room"))
    assert sent == [({"error": "no room"}, final)]
    served = model.TritonPythonModel()
    for ready in (True, False):
        served._service = Mock(engine=Mock(ready=ready))
        assert served.is_ready() is ready
