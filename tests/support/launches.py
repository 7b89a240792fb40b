"""Launches of a step, counted where there is no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from engines.pytorch import attention_kernels, layer_kernels
from mtad.device import cut_kernels, decision_kernels, filter_kernels, level_kernels

NOTHING = {"empty", "new_empty", "empty_like", "dropout", "device"}
"""Operators that launch no kernel, beside those that return views; a dropout outside training returns its input."""
KERNELS = {
    attention_kernels: ("attend_split", "combine_splits"),
    layer_kernels: ("rms_norm", "gate", "narrow_product", "store_columns"),
    filter_kernels: ("scan_tables", "gather_candidates", "weigh_blocks"),
    cut_kernels: ("settle_tables",),
    level_kernels: ("draw_level",),
    decision_kernels: ("spread", "emit"),
}


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that launch a kernel on a GPU, one each, by name.

    An estimate: a GPU's library may take two kernels for a product (split K), and none for an operator on nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        views = any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.arguments)
        out = func(*args, **(kwargs or {}))
        if not views and name not in NOTHING:
            self.counts[name] += 1
        return out


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what is launched inside; Triton's kernels are counted and do not run."""

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                mode.counts[self.name] += 1

            return launch

    with pytest.MonkeyPatch.context() as patch, Launches() as mode:
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(module, name, Counted(name))
        yield mode.counts
