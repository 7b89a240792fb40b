"""Tensor parallelism on two processes of this machine, over gloo: the same logits and tokens as one process has.

Sums over two halves are rounded otherwise than sums over the whole, so logits agree to 1e-5, not to the bit. The
sampled texts below are equal because no decision in them is that close; their seeds are fixed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, MixtralConfig, PretrainedConfig

from engines.base import EngineSpec
from engines.parallel import worker
from engines.parallel.engine import ParallelCache, ParallelEngine, check_plan, check_ranks
from engines.parallel.worker import RankFailed, launched_rank
from engines.placement import Placement
from mtad import LLM, DecodingParams
from mtad.errors import InvalidInput
from tests.support.families import FAMILIES, GROUPED, write_model
from tests.support.ports import free_ports
from tests.support.waiting import STARTING

PairFolders = Callable[[str], Path]

sharding = pytest.mark.skipif(
    find_spec("accelerate") is None or torch.accelerator.current_accelerator() is not None,
    reason="transformers shards a model on a CPU with accelerate and torch's build for CPUs",
)


@sharding
@pytest.mark.slow
def test_one_rank_prints_shards_have_the_checkpoints_logits_a_pair_its_tokens_and_a_rank_that_hangs_ends_the_job(
    pair_folders: PairFolders, tmp_path: Path
) -> None:
    """Of every plan that a family has, and of a mixed batch. A rank that has died torchrun notices itself."""
    names = ("llama-3", "qwen2", "qwen3", "gemma-2", "gpt-neox", "phi-3")
    configs: dict[str, PretrainedConfig] = {name: FAMILIES[name](2) for name in names}
    configs["llama-3"].vocab_size = 319  # shards of the head are not of one size
    configs["mixtral"] = MixtralConfig(**GROUPED, num_hidden_layers=2, num_local_experts=4)
    plans = [config.base_model_tp_plan for config in configs.values()]
    assert all(make(1).base_model_tp_plan in (None, *plans) for make in FAMILIES.values())
    folders = [write_model(tmp_path / name, config) for name, config in configs.items()]
    params = DecodingParams(method="mtad", max_tokens=8, seed=2)
    expected = LLM(pair_folders("torch")).generate("def largest", params)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.parallel_job", str(port), str(tmp_path), str(pair_folders("torch"))]
    command += map(str, folders)
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout is not None
    printed = list[str]()
    while printed[-1:] not in (["decoded\n"], [""]):
        printed.append(job.stdout.readline())
    errors = "".join(path.read_text() for path in tmp_path.glob("errors-*"))
    assert printed[-1] == "decoded\n", errors + job.communicate()[1]
    assert "Traceback" not in errors
    answers = [json.loads(line)["token_ids"] for line in printed if line.startswith("{")]
    assert answers == [expected[0].token_ids]
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    (other,) = (int(child) for child in children if "\0RANK=1\0" in Path(f"/proc/{child}/environ").read_text())
    os.kill(other, signal.SIGSTOP)
    assert job.stderr is not None
    assert any("RankFailed" in line for line in job.stderr), "the one that waits for it gives up"
    os.kill(other, signal.SIGCONT)  # torchrun would wait half a minute for it to end
    job.communicate(timeout=STARTING)
    assert job.returncode == 1


@pytest.mark.parametrize(
    ("family", "format", "ranks", "problem"),
    [
        ("opt", "torch", 2, "no tensor-parallel plan for opt; leave it out"),
        ("llama-3", "torch", 3, "num_attention_heads, 4, cannot be divided"),
        ("llama-3", "torch", 4, "num_key_value_heads, 2, cannot be divided"),
        ("llama-3", "onnx", 2, "format onnx runs on one device"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(
    tmp_path: Path, family: str, format: str, ranks: int, problem: str
) -> None:
    FAMILIES[family](1).save_pretrained(tmp_path)
    spec = EngineSpec(family, 1, 2, 16, 320, "float32", 4, 256, (0,), format, "", {})
    with pytest.raises(InvalidInput, match=problem):
        check_plan(tmp_path, spec, ranks)


def test_ranks_that_cannot_work_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="torchrun has started 0 ranks; start the command with torchrun --nproc"):
        check_ranks(2, "cpu")
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "some"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="torchrun has started 2 ranks"):
        check_ranks(4, "cpu")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(InvalidInput, match="the extra gpu installs it"):
        check_ranks(2, "cpu")
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidInput, match="there are 1 GPUs for 2 ranks"):
        check_ranks(2, "cuda:0")
    for device in ("cpu", "cuda:1"):
        with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES"):
            check_ranks(2, device)
    monkeypatch.setattr(ParallelEngine, "opened", True)
    with pytest.raises(InvalidInput, match="one tensor-parallel pair, once"):
        check_ranks(2, "cuda:0")


def test_layers_with_other_numbers_of_heads_are_each_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5 has the layers of Gemma 4: what differs between them cannot be read of the whole."""
    layers = [SimpleNamespace(num_key_value_heads=heads) for heads in (4, 3)]
    text = SimpleNamespace(base_model_tp_plan={"any": "colwise"}, per_layer_config=layers)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: SimpleNamespace(get_text_config=lambda: text))
    spec = EngineSpec("gemma4", 2, 4, 16, 320, "float32", 4, 256, (0,), "torch", "", {})
    with pytest.raises(InvalidInput, match="num_key_value_heads, 3, cannot be divided"):
        check_plan(tmp_path, spec, 2)


def test_once_a_rank_has_failed_admission_raises_and_rows_can_still_be_released() -> None:
    """`fits` is asked outside of any request, so its error stops the loop."""
    cache = SimpleNamespace(rows=2, capacity=64, pages=8, page_bytes=1, fits=lambda spans: True)
    worker = SimpleNamespace(engine=SimpleNamespace(cache=cache), failed=None, call_on_all_ranks=None)
    parallel = ParallelCache(worker)  # type: ignore[arg-type]
    assert parallel.fits([(0, 8)])
    worker.failed = RankFailed("a rank is gone")
    parallel.release(0)
    with pytest.raises(RankFailed, match="a rank is gone"):
        parallel.fits([(0, 8)])


def test_what_a_rank_prints_is_seen_also_where_transformers_silences_all_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        """As `integrations/tensor_parallel.py` of 4.57.3 does on the second GPU."""
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
        raise MemoryError

    shown = sys.stdout, sys.stderr
    monkeypatch.setattr(worker, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=load))
    monkeypatch.setattr(worker, "dist", SimpleNamespace(get_world_size=lambda: 2))
    spec = EngineSpec("llama", 2, 4, 16, 320, "float32", 4, 256, (0,), "torch", "", {})
    with pytest.raises(MemoryError):
        worker.Worker(tmp_path, spec, Placement())
    assert (sys.stdout, sys.stderr) == shown


def test_only_what_torchrun_has_started_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert launched_rank() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    assert launched_rank() == 1
