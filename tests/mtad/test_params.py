"""Decoding parameters: what is refused, and by which name."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from mtad.errors import InvalidInput
from mtad.methods import METHODS, REMOVED
from mtad.params import DecodingParams
from mtad.rows import RATIOS, RULES, top_k_of

INVALID: dict[str, list[Any]] = {
    "method": ["beams", "", "MTAD", ["mtad"]],
    "draft": ["auxiliary", "", 1, ["lookup"]],
    "draft_len": [0, -1, 129, 1.5, True, "4", None],
    "beam_width": [0, -1, 65, 2.0, False, "4", None],
    "branching": [(), 4, (0,), (2, 1.5), (65,), (8, 3, 3), "4,2", None],
    "accept_threshold": [-0.1, math.inf, math.nan, "0.5", True],
    "divergence": [-0.1, 1.1, math.nan, "0.1", True, None],
    "plausible": [-0.1, 1.1, math.nan, "0.1", True, None],
    "relaxed_topk": [0, -1, 2**31, 1.5, True, None],
    "draft_confidence": [-0.1, 1.1, math.nan, "0.5", True, None],
    "thinking_method": ["beams", "", 3],
    "thinking_threshold": [-0.1, math.inf, math.nan, "0.5", True],
    "thinking_divergence": [-0.1, 1.1, math.nan, "0.1", True],
    "thinking_tags": [("a",), ("a", ""), ("a", 1), ("a", "b", "c"), "ab", None],
    "thinking_token_budget": [-1, 2**31, 1.5, True],
    "temperature": [-1.0, math.inf, math.nan, 1e-3, "1", True, None],
    "top_k": [-1, 2**31, 1.0, True, None],
    "top_p": [-0.5, 1.01, math.nan, "1", True, None],
    "min_p": [-0.5, 1.01, math.nan, "1", True, None],
    "seed": [-1, 2**63, 0.5, True],
    "max_tokens": [0, -1, 1.0, True],
    "stop": ["", ("a", ""), (1,), 3, None],
    "include_stop_str_in_output": [1, "yes", None],
    "stop_token_ids": [3, "2", None],
    "skip_special_tokens": [1, "yes", None],
    "ignore_eos": [1, "yes", None],
    "draft_details": [1, "yes", None],
    "min_tokens": [-1, 1.0, True, None],
    "n": [0, 1025, 1.5, True, None],
    "top_logprobs": [-1, 21, 1.5, True, None],
    "prompt_logprobs": [-1, 21, 1.5, True],
    "bad_words": ["a", ("a", ""), (1,), None],
    "logit_bias": [
        None,
        [1, 2],
        {"a": 1.0},
        {-1: 1.0},
        {1.5: 1.0},
        {3: math.inf},
        {3: "1"},
        {3: None},
        {"9" * 5000: 1.0},
    ],
    "repetition_penalty": [0.0, 1e-7, 1e30, -1.0, math.inf, math.nan, "1", True, None],
    "presence_penalty": [-2.1, 2.1, math.nan, "1", True, None],
    "frequency_penalty": [-2.1, 2.1, math.nan, "1", True, None],
    "json_schema": [3, {"type": "object"}],
    "regex": [3, b"a"],
    "grammar": [3, ["start: 'a'"]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in INVALID.items() for value in values])
def test_an_invalid_value_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        DecodingParams.from_dict({field: value})
    assert caught.value.field == field
    assert caught.value.value is value or field in ("logit_bias", "branching")  # these name the entry
    assert field in str(caught.value)


def test_every_field_has_an_invalid_value_above() -> None:
    assert INVALID.keys() == DecodingParams.__dataclass_fields__.keys()


REALS = [name for name, hint in get_type_hints(DecodingParams).items() if "float" in str(hint)]
"""Fields that are numbers, or hold some, of which a GPU has float32 tensors."""


@pytest.mark.parametrize("value", [1e-300, -1e-300, 1e-46, -1e-46, 1e39, -1e39, 1e308, -1e308, 10**400])
@pytest.mark.parametrize("field", REALS)
def test_a_number_that_float32_does_not_hold_is_refused_by_its_fields_name(field: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        DecodingParams.from_dict({field: {3: value} if field == "logit_bias" else value})


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"^gamma[ :]"):
        DecodingParams.from_dict({"gamma": 4})


@pytest.mark.parametrize("method", REMOVED)
def test_a_method_that_has_left_is_refused_with_what_to_use_instead(method: str) -> None:
    with pytest.raises(InvalidInput, match=f"^method .*{REMOVED[method]}"):
        DecodingParams(method=method)
    assert REMOVED[method].split()[0] in METHODS


def test_a_list_is_as_good_as_a_tuple() -> None:
    values: dict[str, Any] = {"branching": (2, 1), "stop": ("a",), "stop_token_ids": (1,), "bad_words": ("b",)}
    values["thinking_tags"] = "<a>", "</a>"
    lists: dict[str, Any] = {name: list(value) for name, value in values.items()}
    assert DecodingParams(**lists) == DecodingParams(**values)


def test_from_dict_changes_its_base_where_told() -> None:
    base = DecodingParams(method="mmtad", draft_len=7)
    assert DecodingParams.from_dict({"draft_len": 2, "stop": ["a", "b"]}, base) == DecodingParams(
        method="mmtad", draft_len=2, stop=("a", "b")
    )
    assert DecodingParams.from_dict({}, base) == base


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("draft_len", [1, 128]),
        ("beam_width", [1, 64]),
        ("accept_threshold", [0, 0.0, 1, 1e6]),
        ("temperature", [0, 0.0, 0.01, 5]),
        ("top_k", [0, 1]),
        ("top_p", [0, 0.0, 1, 1.0, 1e-6]),
        ("min_p", [0, 0.0, 1, 1.0, 1e-6]),
        ("seed", [None, 0, 2**63 - 1]),
        ("stop", ["a", (), ("a", "b")]),
    ],
)
def test_the_edges_of_the_ranges_are_accepted(field: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(DecodingParams.from_dict({field: value}), field) == value


def test_greedy_keeps_one_token_and_no_filter_the_vocabulary() -> None:
    assert top_k_of(DecodingParams(method="sample", temperature=0.0), 50) == 1
    assert top_k_of(DecodingParams(method="mtad", temperature=0.0, top_k=10), 50) == 10
    assert top_k_of(DecodingParams(top_k=0), 50) == 50
    assert top_k_of(DecodingParams(top_k=99), 50) == 50


@pytest.mark.parametrize("method", METHODS)
def test_sizes_follow_the_method(method: str) -> None:
    params = DecodingParams(method=method, draft_len=3, beam_width=5)
    chain, beams, none = (3, 1, 3), (3, 5, 15), (0, 0, 0)
    expected = {  # of the auxiliary's draft, and of one that is looked up
        "sample": (none, none),
        **dict.fromkeys(("traversal", "budget_tree"), ((3, 4, 10), (3, 4, 12))),
        **dict.fromkeys(("speculative", "block", "budget", "ensemble", "relaxed"), (chain, chain)),
        "mtad": (beams, chain),
        **dict.fromkeys(("mmtad", "mmtad_sample"), (beams, beams)),
    }
    for draft, sizes in zip(("model", "lookup"), expected[method], strict=True):
        own = replace(params, draft=draft)  # type: ignore[arg-type]
        assert (own.drafted, own.draft_width, sum(own.widths)) == sizes


def test_the_weight_of_an_ensemble_is_at_most_1() -> None:
    with pytest.raises(InvalidInput, match=r"^accept_threshold[ :]"):
        DecodingParams(method="ensemble", accept_threshold=1.1)


def test_draft_len_cuts_a_branching_draft() -> None:
    params = DecodingParams(method="traversal", draft_len=2, branching=(3, 2, 2))
    assert params.widths == (3, 6)


def test_another_method_does_not_inherit_a_threshold_of_another_meaning() -> None:
    base = DecodingParams(method="mtad", accept_threshold=0.03)
    assert DecodingParams.from_dict({"method": "ensemble"}, base).threshold == METHODS["ensemble"].threshold
    assert DecodingParams.from_dict({"method": "mtad", "draft_len": 2}, base).threshold == 0.03


def test_drafts_follow_the_load_only_where_neither_law_nor_a_promised_text_depends_on_them() -> None:
    for name, method in METHODS.items():
        automatic = method.form in ("chain", "beams")
        assert DecodingParams(method=name).automatic == automatic
        assert DecodingParams(method=name).follows_load == (automatic and method.exact)
        assert not DecodingParams(method=name, seed=1).follows_load
        assert not DecodingParams(method=name, draft_len=3).automatic
    assert DecodingParams(method="block", seed=1, temperature=0).follows_load


def test_every_rule_is_a_function_and_every_ratio_one_of_them() -> None:
    assert set(RATIOS) <= set(RULES)
    assert set(RULES) == {method.rule for method in METHODS.values()}
    for rule in RULES:
        module, name = rule.split(".")
        assert callable(getattr(importlib.import_module(f"mtad.rules.{module}"), name))


def test_thoughts_inherit_what_means_the_same_to_their_method() -> None:
    plain = DecodingParams(method="mtad", accept_threshold=0.2, draft_confidence=0.1)
    assert plain.thinking is plain
    other = DecodingParams.from_dict({"thinking_method": "budget", "thinking_divergence": 0.3}, plain).thinking
    assert (other.method, other.threshold, other.draft_confidence, other.divergence) == ("budget", 0.0, 0.1, 0.3)
    same = DecodingParams.from_dict({"thinking_threshold": 0.7}, plain).thinking
    assert (same.method, same.threshold, same.draft_confidence) == ("mtad", 0.7, 0.1)
    assert other.thinking is other
    assert not DecodingParams(thinking_method="mtad").lossless
