"""Every option of a running pair stands in `RuntimeConfig`, and the commands make theirs from it."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from mtad import DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput
from runtime.commands.entry import add_options, given_options
from runtime.config import describe


@pytest.mark.parametrize("config", [RuntimeConfig, DecodingParams])
def test_every_option_is_described_once(config: type) -> None:
    texts = describe(config)
    assert list(texts) == [field.name for field in fields(config)]
    assert all(len(text) > 20 for text in texts.values())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rows": 0}, "rows"),
        ({"rows": "2"}, "rows"),
        ({"threads": 0}, "threads"),
        ({"max_waiting": 1.5}, "max_waiting"),
        ({"prefix_tokens": -1}, "prefix_tokens"),
        ({"graphs": None}, "graphs"),
        *(({"max_draft_len": value}, "max_draft_len") for value in (None, "1", math.inf, math.nan, -1.0)),
    ],
)
def test_an_unusable_option_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        RuntimeConfig(**values)


def test_options_of_the_command_line_are_the_fields() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, RuntimeConfig)
    add_options(parser, DecodingParams)
    line = ["--rows", "3", "--memory", "4GiB", "--no-graphs", "--branching", "2,1", "--stop", "a", "--stop"]
    line += ["b", "--logit-bias", '{"5": -1}', "--draft-len", "4", "--top-p", "0.5", "--ignore-eos"]
    parsed = parser.parse_args(line)
    assert given_options(parsed, RuntimeConfig) == {"rows": 3, "memory": "4GiB", "graphs": False}
    assert given_options(parsed, DecodingParams) == {
        "branching": (2, 1),
        "stop": ["a", "b"],
        "logit_bias": {"5": -1},
        "draft_len": 4,
        "top_p": 0.5,
        "ignore_eos": True,
    }
    assert given_options(parser.parse_args([]), RuntimeConfig) == {}
    with pytest.raises(SystemExit):
        parser.parse_args(["--top-p", "often"])
    bad = given_options(parser.parse_args(["--branching", "2,x"]), DecodingParams)
    with pytest.raises(InvalidInput, match="branching = 'x'"):
        DecodingParams.from_dict(bad)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_process_that_serves_a_pair_reads_many_texts_on_one_thread() -> None:
    program = """
import os
from tokenizers import Tokenizer, models
from runtime.config import use_torch

use_torch()
before = len(os.listdir("/proc/self/task"))
Tokenizer(models.BPE({"a": 0}, [])).encode_batch(["a"] * 1000)
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "0\n"
