"""A session that behaves as one of ONNX Runtime's CUDA provider does; the arithmetic is the CPU provider's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class Session(ort.InferenceSession):  # type: ignore[misc]
    """Records its first run with a graph id, and in later ones does what was recorded, whatever is bound then.

    Attributes:
        asked: the providers it was opened with.
        config: the session's configuration, as far as it matters.
        recorded: by graph id, the addresses and shapes a replay works on.
        ran: graph ids of all runs.
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
        self.recorded: dict[int, Any] = {}
        self.ran: list[int] = []

    def get_providers(self) -> Sequence[str]:
        return [*self.asked, CPU] if hasattr(self, "asked") else super().get_providers()

    def get_provider_graph_assignment_info(self) -> Any:
        shapes = {"Shape", "Squeeze", "Concat", "Gather"} | self.missing

        def moved(part: Any) -> Any:
            (node,) = part.get_nodes()
            return SimpleNamespace(ep_name=CPU if node.op_type in shapes else CUDA, get_nodes=part.get_nodes)

        return [moved(part) for part in super().get_provider_graph_assignment_info()]

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        graph = int(run_options.get_run_config_entry("gpu_graph_id"))
        assert run_options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.ran.append(graph)
        if graph != -1 and self.asked[CUDA]["enable_cuda_graph"] == "1":
            iobinding = self.recorded.setdefault(graph, iobinding)
        super().run_with_iobinding(iobinding)

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        del self.recorded[graph_annotation_id]
