"""The attention kernels, in Triton's interpreter: float64's results, from a row's own columns and nothing else."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.base import KV_PAGE, Step
from engines.cache.paged import by_page, gathered
from engines.pytorch import attention
from engines.pytorch.attention import require, split_count
from engines.pytorch.engine import TorchEngine
from engines.pytorch.fixed_cache import scatter_copy
from engines.pytorch.layer_ops import store_columns
from export.checkpoint.checkpoint import Checkpoint
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput
from tests.support.attention_steps import TOLERANCE, Case, make
from tests.support.steps import columns_of

HALF, BRAIN = torch.float16, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes splits of so many columns, where there are programs enough."""

    def set_columns(columns: int, programs: int = 10**6) -> None:
        monkeypatch.setattr(attention, "MIN_SPLIT_COLUMNS", columns)
        monkeypatch.setattr(attention, "PROGRAMS_PER_PROCESSOR", programs)

    return set_columns


@pytest.mark.parametrize(
    "case",
    [
        Case((0, 63, 20), steps=1),
        Case((59, 0), kv_heads=2, group=2, head_dim=128),
        Case((150, 7), group=4, length=192, dtype=HALF, steps=17),
        Case((120, 0, 64), kv_heads=2, group=8, head_dim=128, length=128, dtype=BRAIN, steps=1),
        Case((100, 30), group=1, head_dim=64, length=192, dtype=BRAIN, steps=65),
        Case((190,), group=2, head_dim=128, length=256, dtype=HALF, steps=65),
        Case((15,), group=8, length=128, steps=5, softcap=2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [1024, 64])
def test_attention_of_ragged_trees_is_that_of_float64(case: Case, columns: int, split: Callable[..., None]) -> None:
    split(columns)
    assert make(case).difference() < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_heads_of_any_size_are_padded_to_a_power_of_two(dim: int) -> None:
    assert make(Case((9,), head_dim=dim, group=2, steps=3)).difference() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("columns", [1024, 128])
@pytest.mark.parametrize("window", [1, 70])
def test_a_window_hides_what_is_further_back_than_it(window: int, columns: int, split: Callable[..., None]) -> None:
    split(columns)
    case = Case((180, 66, 3), group=2, length=256, window=window, softcap=3.0)
    inputs = make(case)
    assert inputs.difference() < TOLERANCE[case.dtype]
    out = inputs.attend()
    if window == 70:  # columns that no query's window reaches are not even read
        first = (180 - window + 1) // 64 * 64
        inputs.cache[:, 0, :, :first] = torch.nan
        assert torch.equal(inputs.attend(), out)


def test_what_lies_behind_a_rows_end_or_is_hidden_changes_no_bit(split: Callable[..., None]) -> None:
    split(64)
    case = Case((70, 3), group=2, length=192, steps=7)
    inputs = make(case)
    inputs.mask[1, :, :, 3 + 5 : 3 + 7] = False  # the last two tokens of row 1 are padding
    out = inputs.attend()
    for row, start in enumerate(case.starts):
        inputs.cache[:, row, :, start + case.steps :] = torch.nan
    inputs.cache[:, 1, :, 3 + 5 : 3 + 7] = 1e30
    assert torch.equal(inputs.attend(), out)
    inputs.cache[:, 1, :, 3] += 1.0
    assert not torch.equal(inputs.attend()[1], out[1]), "what is shown counts"


def test_a_query_that_sees_nothing_and_a_row_without_a_request_get_zeros(split: Callable[..., None]) -> None:
    for columns in (1024, 64):
        split(columns)
        inputs = make(Case((70, 100), group=2, length=128, steps=3))
        inputs.mask[0, :, 1] = False
        inputs.write_at[1] = 128  # behind the mask
        out = inputs.attend()
        assert torch.isfinite(out).all()
        assert not out[0, 1].any()
        assert not out[1].any()
        assert out[0, 0].any()


def test_a_row_in_one_split_has_the_bits_of_one_that_is_not_split(split: Callable[..., None]) -> None:
    inputs = make(Case((40, 200), group=4, length=256))
    split(1024)
    whole = inputs.attend()
    split(64)
    parts = inputs.attend()
    assert torch.equal(parts[0], whole[0])
    assert not torch.equal(parts[1], whole[1]), "the other is split"
    longer = replace(inputs, mask=torch.nn.functional.pad(inputs.mask, (0, 64)))
    assert torch.equal(longer.attend(), parts), "the mask's length changes nothing"
    split(1024)
    for row in range(2):
        part = slice(row, row + 1)
        names = ("query", "page_table", "mask", "write_at", "positions")
        alone = replace(inputs, **{name: getattr(inputs, name)[part] for name in names})
        assert torch.equal(alone.attend()[0], whole[row]), "nor do other rows"


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
def test_how_long_the_mask_is_changes_no_bit(window: int | None, split: Callable[..., None]) -> None:
    """So one recording, with a mask of the whole capacity, divides rows of any length as their own mask would."""
    for programs in (1, 4):  # for each of the interpreter's processors
        split(64, programs)
        case = Case((700, 200, 10), kv_heads=2, group=2, length=768, window=window, steps=2)
        inputs = make(case, spare=1280)
        longer = replace(inputs, mask=torch.nn.functional.pad(inputs.mask, (0, 1280)))
        assert torch.equal(longer.attend(), inputs.attend())
        assert inputs.difference() < TOLERANCE[case.dtype]


def test_there_are_as_many_splits_as_leave_two_programs_a_processor() -> None:
    assert split_count(8, 4096, 132) == 32
    assert split_count(8, 131072, 132) == 33
    assert split_count(64, 4096, 132) == 4
    assert split_count(1024, 4096, 132) == 1
    for programs in (1, 8, 100, 5000):
        for length in (64, 192, 2048, 131072):
            splits = split_count(programs, length, 132)
            assert splits == 1 or programs * splits <= 264
            assert (splits - 1) * attention.MIN_SPLIT_COLUMNS < length, "no split is behind all rows' ends"


@pytest.mark.parametrize("case", [Case((5, 40), kv_heads=3, head_dim=80), Case((5, 40), kv_heads=2, dtype=BRAIN)])
def test_a_steps_keys_and_values_are_stored_as_scattering_does(case: Case) -> None:
    inputs = make(case)
    new = torch.randn(2, 2, case.steps, case.kv_heads, case.head_dim).to(case.dtype).transpose(2, 3)
    expected = [scatter_copy(inputs.cache[part], new[part], inputs.write_at) for part in range(2)]
    store_columns(new[0], new[1], inputs.pool[0], inputs.pool[1], inputs.page_table, inputs.write_at)
    assert torch.equal(inputs.cache, torch.stack(expected))


@pytest.mark.parametrize("window", [None, 70])
def test_where_in_the_pool_pages_lie_changes_no_bit(window: int | None, split: Callable[..., None]) -> None:
    split(64)
    inputs = make(Case((180, 66, 3), kv_heads=2, group=2, length=256, window=window))
    moves = torch.randperm(inputs.page_table.numel(), generator=torch.Generator().manual_seed(0))
    pool = torch.empty_like(inputs.pool)
    by_page(pool)[:, :, moves] = by_page(inputs.pool)
    moved = replace(inputs, pool=pool, page_table=moves[inputs.page_table].int())
    assert torch.equal(moved.attend(), inputs.attend())
    new = torch.randn(2, 3, 5, 2, 64).transpose(2, 3)
    for one in (inputs, moved):
        store_columns(new[0], new[1], one.pool[0], one.pool[1], one.page_table, torch.tensor([62, 10**6, 0]))
    ours, theirs = (gathered(one.pool, one.page_table) for one in (moved, inputs))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[0, 0, :, 62:67], new[0, 0])
    spare = slice(10**6 % KV_PAGE + 4 * KV_PAGE, None)
    assert torch.equal(ours[1, 1, :, spare][:, :5], new[1, 1]), "what lies behind a row goes to its last page"


@pytest.mark.slow
def test_a_model_gives_the_logits_it_gives_with_torchs_attention(
    family_checkpoint: Callable[[str], Checkpoint],
) -> None:
    """Behind columns that are stored; `test_fusion` compares first steps of all families."""
    checkpoint = family_checkpoint("gemma-2")
    spec = checkpoint.spec(3, 128, "float32", "torch")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    engines = [TorchEngine(copy.deepcopy(model), spec, attention=name) for name in ("triton", "sdpa")]
    for steps, starts in ((70, (0, 0)), (3, (70, 33))):
        inputs = make(Case(starts, length=128, steps=steps))
        tokens = torch.randint(300, (2, steps), generator=torch.Generator().manual_seed(steps))
        step = Step(tokens, inputs.positions, inputs.write_at, inputs.mask, torch.arange(steps), first_row=1)
        ours, theirs = (engine.step(step) for engine in engines)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*map(columns_of, engines), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_text_is_the_one_that_torchs_attention_gives(pair_folders: Callable[[str], Path]) -> None:
    params = DecodingParams(method="mmtad", draft_len=2, beam_width=2, max_tokens=5, ignore_eos=True, seed=3)
    texts = []
    for name in ("sdpa", "triton"):
        llm = LLM(pair_folders("torch"), RuntimeConfig(threads=1, prefix_tokens=0, attention=name))
        texts.append([result.token_ids for result in llm.generate(["def largest(values):", "S"], params)])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), [("torch", "flash"), ("onnx", "sdpa")])
def test_an_attention_that_a_pair_does_not_have_is_refused(
    pair_folders: Callable[[str], Path], format: str, name: str
) -> None:
    with pytest.raises(InvalidInput, match=r"^attention[ :]"):
        LLM(pair_folders(format), RuntimeConfig(attention=name))


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require("triton", CPU, 256)
    with pytest.raises(InvalidInput, match="known: sdpa, triton"):
        require("flash", CPU, 64)
    with pytest.raises(InvalidInput, match="heads of 288 exceed the limit of 256"):
        require("triton", CPU, 288)
    monkeypatch.setattr("engines.pytorch.attention_kernels.INTERPRETED", False)
    with pytest.raises(InvalidInput, match="runs on a GPU, not on cpu"):
        require("triton", CPU, 64)
    attention.kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "engines.pytorch.attention_kernels")
    monkeypatch.delattr("engines.pytorch.attention_kernels")
    with pytest.raises(InvalidInput, match=r"the extra gpu installs Triton, or give sdpa"):
        require("triton", torch.device("cuda"), 64)
    require("sdpa", CPU, 288)
    attention.kernels.cache_clear()


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """No register spilled, no more shared memory than a program may have, tensor cores used, loads in flight."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_compiler"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(compiled) >= 14
    for kernel in compiled:
        limit = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}[kernel["capability"]] * 1024
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= limit, kernel
        if kernel["name"] == "attend_split":
            assert kernel["asynchronous"] > 0, kernel
            assert kernel["byte_loads"] == 0, "the mask is read in whole words"
            assert kernel["tensor_cores"] > 0 or kernel["dtype"] == "fp32", kernel
        if kernel["name"] == "narrow_product":
            assert kernel["asynchronous"] > 0, kernel
            assert kernel["tensor_cores"] > 0, kernel
            assert kernel["shared"] <= kernel["memory"], "a GPU with less would refuse it"
