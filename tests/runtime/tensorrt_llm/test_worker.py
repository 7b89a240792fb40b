"""Our rule in the library's own worker, on a fake of the place where that decides."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.tensorrt_llm import worker as ours
from tests.support import fake_spec_worker as fake
from tests.support.commands import Run
from tests.support.mock_engine import VOCAB

PARAMS = DecodingParams(method="mtad", beam_width=1, draft_len=3, accept_threshold=0.3)
LEVELS, SLOTS = 3, 9


class Request(NamedTuple):
    """A request of the library in one step; one in context has logits of one token, and no draft."""

    slot: int
    logits: Tensor
    draft: list[int]
    temperature: float
    top_k: int
    top_p: float


def make_requests(draft_probs: Tensor, begun: int) -> list[Request]:
    """A request for each slot, in another order; the first so many are in context."""
    torch.manual_seed(7)
    drafts = torch.stack([torch.multinomial(q, 1)[:, 0] for q in draft_probs]).tolist()
    made = []
    for at, slot in enumerate(torch.randperm(SLOTS).tolist()):
        draft = [] if at < begun else drafts[slot]
        logits = 2 * torch.randn(1 + len(draft), VOCAB)
        logits[: len(draft)] += draft_probs[slot, : len(draft)].log()
        heat, top_k, top_p = (0.7, 1.0)[at % 2], (3, 2**31 - 1)[at % 3 > 0], (0.8, 1.0)[at % 4 > 0]
        made.append(Request(slot, logits, draft, heat, top_k, top_p))
    return made


def decided(requests: Sequence[Request], draft_probs: Tensor, greedy: bool = False) -> Any:
    """The tokens of each request that our worker keeps, or what the library's own gives."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(fake, ours.SEAM, ours.accept_by(0.3))
    worker = fake.SpecWorkerBase()
    rows = torch.tensor([len(request.logits) for request in requests])
    names, slots = ("temperature", "top_k", "top_p"), torch.tensor([request.slot for request in requests])
    each = (torch.tensor([getattr(request, name) for request in requests]) for name in names)
    filters = {f"{name}s": values.repeat_interleave(rows) for name, values in zip(names, each, strict=True)}
    same = torch.zeros_like(slots)  # what requests without a seed have that begin together
    own = {"batch_slot_ids": slots, "request_seeds": same, "request_offsets": same, "draft_probs": draft_probs}
    width = {"draft_probs_last_dim": VOCAB}
    state = {"advanced_sampling_mode": "full", "use_rejection_sampling": True, "is_all_greedy_sample": greedy}
    none = torch.zeros(int(rows.sum()))
    meta = SimpleNamespace(**filters, **own, **width, **state, min_ps=none)
    drafts = torch.tensor([request.draft for request in requests if request.draft], dtype=torch.int32)
    begun, logits = len(requests) - len(drafts), torch.cat([request.logits for request in requests])
    found = worker._accept_draft_tokens(logits, drafts.view(-1, LEVELS), begun, len(requests), meta)
    monkeypatch.undo()
    if found is fake.STRICT:
        return found
    tokens, counts = found
    assert tokens.dtype == counts.dtype == torch.int32
    assert tokens.shape == (len(requests), 1 + LEVELS)
    return [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]


def test_chains_are_decided_as_the_paper_has_it() -> None:
    """The longest prefix whose joint ratio exceeds the threshold, though shorter ones may fail; then p behind it."""
    torch.manual_seed(1)
    rows, levels, kept = 300, 4, set()
    for threshold in (0.0, 0.3, 0.9):
        p, q = (torch.randn(rows, levels + more, VOCAB).mul(2).softmax(-1) for more in (1, 0))
        p = p.masked_fill(p < 0.02, 0)
        drafted, uniform = torch.multinomial(q.view(-1, VOCAB), 1).view(rows, levels), torch.rand(rows).double()
        log_threshold = math.log(threshold) if threshold else -math.inf
        tokens, counts = ours.decide(drafted, p, q, uniform, log_threshold)
        for row in range(rows):
            length, ratio = 0, 1.0
            for at, token in enumerate(drafted[row].tolist()):
                ratio *= float(p[row, at, token]) / float(q[row, at, token])
                length = at + 1 if ratio > threshold else length
            behind = p[row, length].cumsum(0)
            bonus = int((behind <= uniform[row] * behind[-1]).sum())
            assert tokens[row, : int(counts[row])].tolist() == [*drafted[row, :length].tolist(), bonus]
            kept.add(length)
    assert kept == set(range(levels + 1))


def test_what_is_kept_of_a_draft_does_not_depend_on_who_else_is_in_the_batch() -> None:
    """Requests have places, slots and filters of their own; some are in context. The token behind is drawn by row."""
    draft_probs = torch.randn(SLOTS, LEVELS, VOCAB, generator=torch.Generator().manual_seed(1)).mul(2).softmax(-1)
    requests = make_requests(draft_probs, begun=3)
    together = decided(requests, draft_probs)
    for request, tokens in zip(requests, together, strict=True):
        beside = [] if request.draft else requests[-1:]  # a batch of prompts alone is the library's own
        assert decided([request, *beside], draft_probs)[0][:-1] == tokens[:-1]
        assert tokens[:-1] == request.draft[: len(tokens) - 1], "what is kept was drafted"
    assert [len(tokens) for tokens in together[:3]] == [1, 1, 1]
    assert sum(map(len, together)) > SLOTS + 4


def test_requests_without_a_seed_that_begin_together_draw_different_tokens() -> None:
    """The library gives them one seed and one offset, and leaves it to the sampler to keep rows apart."""
    draft_probs = torch.full((SLOTS, LEVELS, VOCAB), 1 / VOCAB)
    alike = Request(0, torch.zeros(1 + LEVELS, VOCAB), [0] * LEVELS, 1.0, 2**31 - 1, 1.0)
    found = decided([alike._replace(slot=slot) for slot in range(SLOTS)], draft_probs)
    assert all(tokens[:-1] == alike.draft for tokens in found)
    assert len({tokens[-1] for tokens in found}) > SLOTS // 2


def test_a_batch_in_which_nobody_samples_is_the_librarys_own() -> None:
    draft_probs = torch.full((SLOTS, LEVELS, VOCAB), 1 / VOCAB)
    assert decided(make_requests(draft_probs, 2), draft_probs, greedy=True) is fake.STRICT


def test_nothing_is_read_back_to_the_host() -> None:
    """On tensors without content: whatever asks for a value raises, as it does while a CUDA graph is captured."""
    drafted = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    p, q = (torch.zeros(2, 3 + more, VOCAB, device="meta") for more in (1, 0))
    seeds = torch.zeros(2, dtype=torch.int64, device="meta")
    tokens, counts = ours.accept_by(0.3)(q, drafted, p, seed=seeds, offset=seeds)
    assert (tokens.shape, counts.shape) == ((2, 4), (2,))


def test_random_numbers_are_uniform_and_differ_by_seed_and_progress() -> None:
    numbers = ours.uniforms(torch.arange(200).repeat(200) - 100, torch.arange(200).repeat_interleave(200))
    assert (float(numbers.min()), float(numbers.max())) == pytest.approx((0, 1), abs=1e-3)
    assert float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert len(set(numbers.tolist())) == 40_000, "of 53 bits; of 24, some would be equal"
    assert torch.histc(numbers, 20, 0, 1).sub(2000).abs().max() < 250


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return fake.install(monkeypatch)


def test_what_is_exported_starts_the_librarys_server_with_our_rule(
    library: SimpleNamespace,
    checkpoints: tuple[Path, Path],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(checkpoints[0].parent)  # whoever starts the server may be elsewhere
    named = [os.path.relpath(one) for one in checkpoints]
    given = ["--target", named[0], "--auxiliary", named[1], "--to", "tensorrt-llm-worker"]
    defaults = '{"method": "mtad", "draft_len": 3, "accept_threshold": 0.2}'
    assert run("export", tmp_path / "worker", *given, "--defaults", defaults).code == 0
    config = tmp_path / "worker" / "worker.yaml"
    drafts = {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": str(checkpoints[1])}
    own = {"speculative_config": {**drafts, "use_rejection_sampling": True}}
    assert yaml.safe_load(config.read_text()) == {
        "model": str(checkpoints[0]),
        **own,
        "mtad": {"accept_threshold": 0.2},
    }
    ours.serve([str(config), "--port", "8001"])
    ((module, arguments),) = library.served
    assert module == "tensorrt_llm.commands.serve"
    assert arguments[:3] == ["trtllm-serve", str(checkpoints[0]), "--config"]
    assert arguments[4:] == ["--port", "8001"]
    assert sys.modules[ours.INTERFACE].rejection_sampling_one_model.__qualname__.startswith("accept_by")


def written(folder: Path, **others: Any) -> Path:
    """A configuration as the export writes it."""
    (path := folder / "worker.yaml").write_text(yaml.safe_dump(ours.worker_config("t", "a", PARAMS) | others))
    return path


def test_models_in_other_processes_and_backends_are_refused(library: SimpleNamespace, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), 2)
    others = [("orchestrator_type", "ray"), ("orchestrator_type", "rpc"), ("backend", "_autodeploy")]
    for name, value in [*sizes.items(), *others]:
        with pytest.raises(InvalidInput, match=f"{name} = {value!r}: "):
            ours.install(written(tmp_path, **{name: value}))
    ours.install(written(tmp_path, **dict.fromkeys(sizes, 1), orchestrator_type=None, backend="pytorch"))
    for option in ("--tp_size", "--backend", "--config", "--extra_llm_api_options"):
        with pytest.raises(InvalidInput, match=r"one configuration, .* ranks"):
            ours.serve([str(written(tmp_path)), option, "2"])
    library.single = False
    with pytest.raises(InvalidInput, match="TLLM_WORKER_USE_SINGLE_PROCESS"):
        ours.install(written(tmp_path))


@pytest.mark.usefixtures("library")
def test_drafts_whose_length_changes_are_refused(tmp_path: Path) -> None:
    """After a change, the library hands out placeholders of probability 1, which the rule would take for drafts."""
    fixed = ours.worker_config("t", "a", PARAMS)["speculative_config"]
    for name, value in (("draft_len_schedule", {1: 3, 8: 0}), ("max_concurrency", 8)):
        with pytest.raises(InvalidInput, match=rf"speculative_config\.{name} = .* leave it out"):
            ours.install(written(tmp_path, speculative_config=fixed | {name: value}))
        ours.install(written(tmp_path, speculative_config=fixed | {name: None}))
    with pytest.raises(InvalidInput, match="not a configuration that mtad export"):
        ours.install(written(tmp_path, speculative_config=None))


def test_what_the_library_has_changed_is_named(library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract: the function that is replaced, the method that calls it, and by which names."""
    ours.check_contract(interface := sys.modules[ours.INTERFACE])

    def renamed(draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, seed: int, offset: int) -> None: ...

    def another(self: Any, logits: Tensor, draft_tokens: Tensor, num_contexts: int) -> None: ...

    def one_seed(  # for all of a batch, as other releases have it
        self: Any,
        logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        num_contexts: int,
        batch_size: int,
        spec_metadata: Any,
    ) -> None:
        fake.rejection_sampling_one_model(
            draft_probs=draft_probs,
            draft_token_ids=draft_tokens,
            target_probs=logits,
            deterministic=True,
            seed=self.seed,
            offset=self.offset,
        )

    for owner, name, other, said in (
        (interface, ours.SEAM, renamed, f"changed in {ours.INTERFACE}: {ours.SEAM};"),
        (fake.SpecWorkerBase, ours.CALLER, another, f"SpecWorkerBase.{ours.CALLER}, the call of {ours.SEAM}, "),
        (fake.SpecWorkerBase, ours.CALLER, one_seed, f"changed in {ours.INTERFACE}: seeds of each request;"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            with pytest.raises(InvalidInput, match=said):
                ours.check_contract(interface)


@pytest.mark.usefixtures("library")
def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ours, "versions", lambda name: {name: "1.4.0"})
    with pytest.raises(InvalidInput, match=r"1\.4\.0.*another release.*tensorrt-llm==1\.4\.0rc1"):
        ours.install(written(tmp_path))


def test_without_the_library_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    with pytest.raises(InvalidInput, match="NVIDIA's package index"):
        ours.install(written(tmp_path))
