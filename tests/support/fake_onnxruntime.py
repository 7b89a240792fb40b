"""A session and a stream that behave as those of ONNX Runtime's CUDA provider do, and compute on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import onnxruntime as ort
import torch

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class Session(ort.InferenceSession):  # type: ignore[misc]
    """Runs on the CPU, and says that it runs on a GPU.

    Attributes:
        asked: the providers it was opened with.
        config: the session's configuration, as far as it matters.
        missing: operators without a kernel on the GPU.
    """

    missing: frozenset[str] = frozenset()

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        assert kwargs == {"enable_fallback": 0}, "an error would be printed, and the session fall back to the CPU"
        super().__init__(path_or_bytes, sess_options, providers=[CPU])
        self.asked = dict(providers)
        names = ("session.use_device_allocator_for_initializers", "session.record_ep_graph_assignment_info")
        self.config = {name: sess_options.get_session_config_entry(name) for name in names}

    def get_providers(self) -> Sequence[str]:
        return [*self.asked, CPU] if hasattr(self, "asked") else super().get_providers()

    def get_provider_graph_assignment_info(self) -> Any:
        shapes = {"Shape", "Squeeze"} | self.missing

        def moved(part: Any) -> Any:
            (node,) = part.get_nodes()
            return SimpleNamespace(ep_name=CPU if node.op_type in shapes else CUDA, get_nodes=part.get_nodes)

        return [moved(part) for part in super().get_provider_graph_assignment_info()]

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        assert Stream.inside, "run on the caller's stream"
        assert run_options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        super().run_with_iobinding(iobinding)


class Stream:
    """A stream whose work is done at once, on the CPU.

    Attributes:
        inside: whether work goes to it.
    """

    inside: ClassVar[bool] = False
    device, cuda_stream = torch.device("cpu"), 7


@contextmanager
def ordered(stream: Stream) -> Iterator[None]:
    """In the place of `engines.capture.ordered`."""
    Stream.inside = True
    try:
        yield
    finally:
        Stream.inside = False
