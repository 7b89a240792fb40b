"""Opening a pair folder: two engines, tuned defaults."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engines.base import Engine
from engines.folder import open_engine, read_json, read_spec, vocabulary_hash, write_json
from engines.memory import Memory, format_bytes
from engines.no_auxiliary import NoAuxiliary
from engines.vocabulary import Translation
from mtad.errors import InvalidInput, refused_as
from mtad.methods import REMOVED
from mtad.params import SAMPLING, DecodingParams
from runtime import fastest
from runtime.config import RuntimeConfig, check_least
from runtime.decoder.translated import TranslatedEngine
from runtime.fastest import LEVELS, draft_seconds, fastest_placement, step_seconds
from runtime.speculation.lengths import DraftCosts

log = logging.getLogger(__name__)


ROLES = ("target", "auxiliary")
"""Names of the two engine folders; a pair whose drafts are looked up has the first alone."""


@dataclass(frozen=True)
class Pair:
    """Two engines that decode together.

    Attributes:
        auxiliary: `NoAuxiliary` where drafts are looked up alone.
        vocab_size: token ids of the target, and of what it is given.
        weights: bytes of both models' weights, as stored.
        defaults: decoding parameters of `pair.json` over the package's.
        costs: what drafts cost that no clock may decide.
        runs_on: what runs both engines and, where that was not asked for by name, why; for people.

    Raises:
        InvalidInput: the engines' caches are on two devices, one of them a torch engine's.
    """

    target: Engine
    auxiliary: Engine
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos: tuple[int, ...]
    weights: int
    defaults: DecodingParams
    costs: DraftCosts = field(default_factory=DraftCosts)
    runs_on: str = ""

    def __post_init__(self) -> None:
        devices = [engine.device for engine in (self.target, self.auxiliary)]
        if devices[0] != devices[1] and (self.target.capturable or self.auxiliary.capturable):
            raise InvalidInput("device", " and ".join(map(str, devices)), "both engines must be on one device")

    def memory(self, config: RuntimeConfig, prefix_tokens: int) -> Memory:
        """What it takes, with pages for all rows where rows share them; see `Memory.of`.

        Where beams of the auxiliary have pages of their own, a row's memory includes those of its widest draft.
        """
        target, auxiliary = self.target.cache, self.auxiliary.cache
        pages = max(target.page_columns, auxiliary.page_columns), (target.page_bytes, auxiliary.page_bytes)
        specs = self.target.spec, self.auxiliary.spec
        whole = Memory.of(*specs, self.weights, config.nodes + 1, prefix_tokens, *pages)
        beam = auxiliary.beam_pages(config.max_draft_len) * auxiliary.page_bytes
        return replace(whole, row=whole.row + config.max_beam_width * beam)

    def settled(self, params: DecodingParams) -> DecodingParams:
        """A request's parameters, with drafts that this pair has.

        Raises:
            InvalidInput: they ask for the auxiliary, and there is none.
        """
        if not isinstance(self.auxiliary, NoAuxiliary) or not (params.uses_model or params.thinking.uses_model):
            return params
        if params.draft is not None:
            raise InvalidInput("draft", params.draft, "the pair has no auxiliary; give lookup, or leave it out")
        return replace(params, draft="lookup")

    @property
    def law(self) -> str:
        """What a request gets that asks for nothing else; for people."""
        bound = f"within divergence {self.defaults.divergence:g}" if self.defaults.spec.bounded else "not lossless"
        sampling = ", ".join(f"{name} {getattr(self.defaults, name):g}" for name in SAMPLING)
        return f"default: {self.defaults.method} ({'lossless' if self.defaults.lossless else bound}), {sampling}"

    @property
    def device(self) -> torch.device:
        """Where tensors of blocks are: with the caches, or on the CPU where those are apart."""
        target, auxiliary = self.target.device, self.auxiliary.device
        return target if target == auxiliary else torch.device("cpu")


def open_pair(folder: Path | str, config: RuntimeConfig | None = None) -> Pair:
    """Open what `mtad export` wrote.

    Args:
        config: how it runs; by default, `RuntimeConfig()`. The memory is that of rank 0 where the target is sharded.

    Raises:
        InvalidInput: the folder is not a usable pair, or does not run there.
    """
    folder, config = Path(folder), config or RuntimeConfig()
    rows, ranks, nodes = config.rows, config.tensor_parallel, config.nodes
    if ranks > 1:  # imports transformers' models, which takes longer than to open an engine that has none
        from engines.parallel.engine import follow_if_launched, open_parallel

        follow_if_launched()
    values = read_description(folder)
    vocab_size, vocabularies = values["vocab_size"], (values["vocabulary_hash"], values["auxiliary_vocabulary_hash"])
    specs = {name: read_spec(folder / name) for name in values["engines"]}
    target, auxiliary = specs["target"], specs.get("auxiliary", specs["target"].without_layers)
    for name in ("rows", "capacity"):
        if (ours := getattr(target, name)) != (theirs := getattr(auxiliary, name)):
            raise InvalidInput(name, f"{ours} and {theirs}", "the two engines must agree; export the pair again")
    translated = "auxiliary" in specs and vocabularies[0] != vocabularies[1]
    if vocab_size > (target.vocab_size if translated else min(target.vocab_size, auxiliary.vocab_size)):
        raise InvalidInput("pair.json vocab_size", vocab_size, "an engine has fewer logits; export the pair again")
    fewest = rows or (1 if config.memory is not None else target.rows)  # a timing takes no more memory than is allowed
    timed = {folder / name: replace(spec, rows=fewest) for name, spec in specs.items()}
    placement, why = fastest.choose_provider(config.placement, timed)
    kinds = [placement.check(spec) for spec in specs.values()]
    weights = {name: sum(file.stat().st_size for file in (folder / name).glob("model*")) for name in specs}
    paged = any(kind.paged for kind in kinds)
    keep = config.prefix_columns(target.capacity)
    if not paged:
        whole = Memory.of(target, auxiliary, sum(weights.values()), nodes + 1, keep)
        if config.memory is not None:
            fitting = whole.within(config.memory).rows
            rows = fitting if rows is None else min(rows, fitting)
        elif not placement.on_gpu and all(kind.stored != "plan" for kind in kinds):
            _check_memory(replace(whole, rows=rows or whole.rows))
    tokenizers = [open_tokenizer(folder / name, own) for name, own in zip(specs, vocabularies, strict=False)]
    if ranks > 1:
        parallel = open_parallel(folder / "target", replace(target, rows=rows or target.rows), ranks, placement)
        engine: Engine = parallel
        weights["target"] = parallel.weights
    else:
        engine = open_engine(folder / "target", placement, rows)
    drafter: Engine = NoAuxiliary(engine.spec, str(engine.device))
    own = placement
    if "auxiliary" in specs:
        if kinds[1].provider == "openvino":
            own = fastest_placement(folder / "auxiliary", replace(auxiliary, rows=engine.spec.rows), placement)
        drafter = open_engine(folder / "auxiliary", own, rows)
    if translated:
        drafter = TranslatedEngine(drafter, Translation.of(*tokenizers), nodes)
    apart = "" if own is placement else ", which drafts faster"
    runs_on = f"target: {engine.name}; auxiliary: {drafter.name}{apart}{f' ({why})' if why else ''}"
    log.info("%s", runs_on)
    with refused_as("pair.json costs", values["costs"], "give level and node"):
        check_least(costs := DraftCosts(**values["costs"]), level=0, node=0)
    pair = Pair(
        target=engine,
        auxiliary=drafter,
        tokenizer=tokenizers[0],
        vocab_size=vocab_size,
        eos=target.eos_token_ids,
        weights=sum(weights.values()),
        defaults=read_defaults(values["defaults"] | values["tuned"]),
        costs=costs,
        runs_on=runs_on,
    )
    log.info("%s", pair.law)
    if config.memory is not None and paged:
        pages = pair.memory(config, keep).within(config.memory).pages
        for one in (engine, drafter):
            if one.cache.pages:
                one.cache.allocate_pages(pages)
    return pair


def _check_memory(wanted: Memory) -> None:
    """Refuse rows that this machine cannot hold, before a cache is allocated."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else wanted.total
    if wanted.total > there:
        problem = f"{wanted}, and this machine has {format_bytes(there)}; give fewer, or --memory for as many as fit"
        raise InvalidInput("rows", wanted.rows, problem)


def read_description(folder: Path) -> dict[str, Any]:
    """What `pair.json` says: `tuned` parameters lie over its `defaults`, and what it leaves out is as in most pairs."""
    values = {"tuned": {}, "costs": {}, **read_json(folder, "pair.json")}
    values.setdefault("auxiliary_vocabulary_hash", values.get("vocabulary_hash"))
    kinds = {"vocab_size": int, "vocabulary_hash": str, "defaults": dict, "tuned": dict, "costs": dict}
    kinds["auxiliary_vocabulary_hash"] = str
    for name, kind in kinds.items():
        if type(values.get(name)) is not kind or (name == "vocab_size" and values[name] < 1):
            raise InvalidInput(f"pair.json {name}", values.get(name), "missing or damaged; export again")
    if values.setdefault("engines", list(ROLES)) not in (["target"], list(ROLES)):
        raise InvalidInput("pair.json engines", values["engines"], "give target, or target and auxiliary")
    return values


def read_defaults(values: dict[str, Any]) -> DecodingParams:
    """Defaults of a pair.json; where it names a method that has left, the package's default takes its place."""
    if (method := str(values.get("method"))) in REMOVED:
        default, own = DecodingParams.method, ("method", "accept_threshold", "draft_confidence")
        log.warning("pair.json names the method %s, which is no longer there; %s takes its place", method, default)
        values = {name: value for name, value in values.items() if name not in own}
    return DecodingParams.from_dict(values)


def store_costs(folder: Path) -> None:
    """Measure what drafts cost here, and keep it in `pair.json`; the drafts of seeded requests then go by it anywhere.

    Raises:
        InvalidInput: the pair does not run here.
    """
    pair = open_pair(folder, RuntimeConfig(rows=1))
    one, many = (step_seconds(pair.target, tokens) for tokens in (1, 17))
    drafts = 0.0 if isinstance(pair.auxiliary, NoAuxiliary) else draft_seconds(pair.auxiliary, 1)
    level, node = drafts / LEVELS / one, max(0.0, many - one) / 16 / one
    costs = DraftCosts(round(level, 3), round(node, 3))
    write_json(folder / "pair.json", read_json(folder, "pair.json") | {"costs": asdict(costs)})


def write_tuning(folder: Path, tuned: dict[str, Any], report: dict[str, Any]) -> None:
    """Let tuned parameters lie over the defaults that a pair was exported with, and keep what led to them beside.

    `pair.json` is replaced in one step: whoever reads it meanwhile sees the old file or the new one. A tuning before
    this one is replaced.

    Raises:
        InvalidInput: not a pair folder, it cannot be written, or the parameters are not usable.
    """
    DecodingParams.from_dict(read_description(folder)["defaults"] | tuned)
    values = read_json(folder, "pair.json") | {"tuned": tuned, "tuning": report}
    try:
        write_json(folder / "pair.json", values)
    except OSError as error:
        raise InvalidInput("pair", str(folder), f"pair.json cannot be written: {error}") from None


def open_tokenizer(folder: Path, vocabulary: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of an engine folder.

    Args:
        vocabulary: hash that its vocabulary must have; None: any.

    Raises:
        InvalidInput: damaged, or another vocabulary.
    """
    problem = "its tokenizer cannot be loaded; if it is damaged, delete the folder and export again"
    with refused_as("folder", str(folder), problem):  # there are many errors for damaged files
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.encode("a")  # by a damaged normalizer too
    if vocabulary is not None and vocabulary_hash(tokenizer.get_vocab()) != vocabulary:
        raise InvalidInput("folder", str(folder), "its vocabulary is not the one that was checked; export again")
    return tokenizer
