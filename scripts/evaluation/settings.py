"""The settings that are compared: a table of labels, and the drafts that each of them is tried with.

An entry is a method of `mtad.methods`, or `greedy`, or `block-again` (`block` with other random numbers), and perhaps
changes: `mtad:accept_threshold=0.1`. What an entry does not fix is `PAPER`'s, but for the draft: each setting gets the
length and the width that are fastest on development texts (`scripts/evaluation/measure.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams

DEFAULT = (
    "sample,block-again,block:draft_len=auto,speculative,block:temperature=0,budget,budget:divergence=0.2,mtad,"
    "mtad:accept_threshold=0.1,mtad:temperature=0,mmtad,mmtad:accept_threshold=0.1,mmtad_sample,"
    "mmtad_sample:accept_threshold=0.1"
)
PAPER = DecodingParams(method="mtad", draft_len=4, beam_width=4, top_k=10, top_p=0.9)
"""Parameters of the paper's experiments."""
TEMPERATURES = (0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
"""Of the curve of `block`, which every method is compared with. At all but the lowest, the auxiliary writes alone; this
must not count as a gain."""
BLOCK, AGAIN, GREEDY = "block", "block again", "greedy"
NAMED: dict[str, dict[str, Any]] = {
    "block-again": {"method": "block"},
    GREEDY: {"method": "sample", "temperature": 0.0},
}
DRAFTS: dict[str, tuple[Any, ...]] = {
    "draft_len": (2, 3, 4, 6, 8),
    "beam_width": (2, 4, 8),
    "branching": ((2, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 1), (2, 2, 2, 1, 1, 1)),
}
"""Values that are tried."""
LONGEST, WIDEST = 16, 8
"""Of automatic drafts, which may be as long as for users; those of `DRAFTS` are shorter."""


@dataclass(frozen=True)
class Setting:
    """One row of the tables.

    Attributes:
        label: in tables.
        params: all decoding parameters; their seed is replaced.
        fixed: names of the parameters that the user gave, which are not searched.
        alone: the auxiliary writes, without the target.
        again: with other random numbers than all other settings.
    """

    label: str
    params: DecodingParams
    fixed: tuple[str, ...] = ()
    alone: bool = False
    again: bool = False

    @property
    def deterministic(self) -> bool:
        """Whether every answer to a prompt is the same."""
        return self.params.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether its texts are distributed as the target's samples of the same temperature and filters."""
        return self.params.lossless and not self.alone

    @property
    def drafts(self) -> list[DecodingParams]:
        """The parameters with every draft that is tried."""
        parts = self.params, self.params.thinking
        used = [name for name in DRAFTS if any(p.spec.uses(name) for p in parts) and name not in self.fixed]
        if "branching" in used:
            used = ["branching"] if "draft_len" not in self.fixed else []
        tried = itertools.product(*(DRAFTS[name] for name in used))
        return [replace(self.params, **_whole(dict(zip(used, values, strict=True)))) for values in tried]

    @property
    def draft(self) -> str:
        """Length and width of the draft, for tables."""
        if not self.params.drafts:
            return "-"
        return " x ".join(map(str, self.params.widths if self.params.spec.form == "branches" else self._size))

    @property
    def _size(self) -> tuple[object, ...]:
        wide = "beams" in (self.params.spec.form, self.params.thinking.spec.form)
        return (self.params.draft_len, self.params.beam_width) if wide else (self.params.draft_len,)

    @property
    def description(self) -> dict[str, Any]:
        """What decides its answers: the parameters that differ from `PAPER`."""
        plain, values = asdict(PAPER), asdict(self.params)
        changed = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v != plain[name]}
        return {**changed, "method": self.params.method, "alone": self.alone, "again": self.again}


def curve_label(temperature: float) -> str:
    """Of `block` at a temperature of the curve."""
    return BLOCK if temperature == 1 else f"{BLOCK} temperature={temperature:g}"


def every_setting(
    methods: str, max_tokens: int, stop: Sequence[str], temperatures: Sequence[float] = TEMPERATURES
) -> list[Setting]:
    """`greedy`, the entries, `block` at all temperatures, and the auxiliary alone.

    Args:
        methods: entries of the command line, separated by commas.
        max_tokens, stop: of all settings.
        temperatures: some of `TEMPERATURES`, ascending, the last one 1.

    Raises:
        InvalidInput: a method, a parameter or a value is unusable, or a setting is given twice.
    """
    base = replace(PAPER, max_tokens=max_tokens, stop=tuple(stop))
    if list(temperatures) != sorted({*temperatures, 1.0} & {*TEMPERATURES}):
        raise InvalidInput("temperatures", temperatures, f"give some of {TEMPERATURES}, ascending, and 1 as the last")
    found = [_parse(entry, base) for entry in [GREEDY, *filter(None, methods.split(","))]]
    block = replace(base, method="block")
    found += [Setting(curve_label(t), replace(block, temperature=t), ("temperature",)) for t in temperatures]
    for t in temperatures[1:] or temperatures:
        params = replace(base, method="sample", temperature=t)
        found.append(Setting(f"auxiliary alone temperature={t:g}", params, alone=True))
    labels = [one.label for one in found]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise InvalidInput("methods", ",".join(twice), "is measured already; give each setting once")
    return found


def _parse(entry: str, base: DecodingParams) -> Setting:
    name, *parts = entry.split(":")
    start = NAMED.get(name, {"method": name})
    if start["method"] not in METHODS:
        raise InvalidInput("methods", name, f"unknown; choose from {', '.join([*NAMED, *METHODS])}")
    changes = dict(_change(part) for part in parts)
    label = " ".join([name.replace("-", " "), *(f"{field}={value}" for field, value in changes.items())])
    return Setting(label, DecodingParams.from_dict({**start, **changes}, base), tuple(changes), again=label == AGAIN)


def _change(part: str) -> tuple[str, Any]:
    name, equals, text = part.partition("=")
    if not equals or name not in {field.name for field in fields(DecodingParams)} - {"method", "seed", "n"}:
        raise InvalidInput("methods", part, "give changes as field=value, with a decoding parameter")
    for kind in (int, float):
        try:
            return name, kind(text)
        except ValueError:
            continue
    return name, text


def _whole(values: dict[str, Any]) -> dict[str, Any]:
    return values | ({"draft_len": len(values["branching"])} if "branching" in values else {})
