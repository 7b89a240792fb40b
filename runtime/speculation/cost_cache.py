"""Tables of step costs kept between starts. No torch.

A table holds for one pair on one machine in one setting, so it is not kept in the pair's folder, which may be
read-only or shared by machines, but in the user's: `$MTAD_CACHE`, else `$XDG_CACHE_HOME/mtad`, else `~/.cache/mtad`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from pathlib import Path

from engines.folder import cache_folder, write_json
from engines.placement import cores, versions
from mtad.errors import InvalidInput
from runtime.speculation.step_costs import StepCosts

log = logging.getLogger(__name__)

PACKAGES = ("mtad", "numpy", "onnxruntime", "onnxruntime-gpu", "torch")
"""Whose versions decide how long a step takes."""


def machine() -> dict[str, object]:
    """What of this machine a step's time depends on: processor, cores this process may use, package versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": platform.node(),
        "processor": f"{model or platform.processor()}, {platform.machine()}",
        "cores": cores(),
        "versions": versions(*PACKAGES),
    }


class CostCache:
    """The kept table of one pair in one setting on one machine.

    Args:
        setting: all that a step's time depends on, as JSON values.
        folder: where tables are kept; default: the user's cache folder.

    Attributes:
        path: the table's file.
    """

    def __init__(self, setting: Mapping[str, object], folder: Path | None = None) -> None:
        self._setting = json.loads(json.dumps(setting))
        digest = hashlib.sha256(json.dumps(self._setting, sort_keys=True).encode()).hexdigest()
        self.path = (folder or cache_folder()) / "costs" / f"{digest[:16]}.json"

    def load(self) -> StepCosts | None:
        """The kept table; None if there is none for exactly this setting. A damaged one is said so and left out."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["setting"] != self._setting:
                return None
            return StepCosts.from_dict(values["costs"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, InvalidInput) as error:
            log.warning("step costs in %s cannot be used (%s); measuring them again", self.path, error)
            return None

    def save(self, costs: StepCosts) -> None:
        """Keep a table; where the folder cannot be written, that is said and nothing kept."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"setting": self._setting, "costs": costs.to_dict()})
        except OSError as error:
            log.warning("step costs cannot be kept in %s: %s", self.path.parent, error)
