"""Whatever is wrong with a command line is one line on stderr that names it, and exit code 2; nothing is written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import Run, assert_refused

EXPORT = "export new --target TARGET --auxiliary AUXILIARY"
TORCH, WORKER = f"{EXPORT} --rows 2 --capacity 128 --to torch", f"{EXPORT} --to tensorrt-llm-worker"
TUNE = "tune PAIR --prompts prompts.jsonl --threads 1 --method mtad"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generate", "pair"),
        ("generate PAIR S --gamma 4", "--gamma"),
        ("generate PAIR S --method medusa", "--method = "),
        ("generate PAIR S --file /no/such/prompt", "cannot be read"),
        ("inspect nowhere", "no such folder"),
        ("check empty", "no engine.json"),
        ("check PAIR/target PAIR/auxiliary", "engines of different models"),
        ("check PAIR/target PAIR/target --checkpoint x", "not both"),
        ("check PAIR/target --checkpoint /no/such", "no such folder"),
        ("check PAIR PAIR/target", "is not a pair folder"),
        ("check PAIR/target --tolerance nan", "tolerance"),
        (f"{TORCH} --quantise", "--quantise"),
        (f"{TORCH} --defaults {{", "defaults"),
        (f"{WORKER} --rows 4", "leave it out"),
        (f"{WORKER} --dry-run", "leave it out"),
        (f'{WORKER} --defaults \'{{"method": "mtad", "beam_width": 4}}\'', "beam_width = "),
        (f'{WORKER} --defaults \'{{"method": "mmtad"}}\'', "method = "),
        (f'{WORKER} --defaults \'{{"method": "mtad", "draft_len": "auto"}}\'', "draft_len = "),
        ("serve nowhere", "no such folder"),
        ("serve any --api-key 'a key'", "api-key = '***'"),
        ("serve any --api-key-file nowhere", "api-key-file"),
        ("serve any --max-body big", "max-body = 'big': give bytes"),
        ("serve any --port 99999", "port = 99999"),
        ("serve any --port 0 --max-replicas 2", "only with --replicas"),
        ("serve any --host 192.0.2.1", "192.0.2.1:8000"),
        ("serve any --host 'no such host'", "no such host:8000"),
        ("serve PAIR --port 0 --chat-template broken.jinja", "chat-template = "),
        ("triton nowhere models", "no such pair folder"),
        ("triton PAIR PAIR/models", "inside the pair folder"),
        ("triton PAIR models --model ../x", "model = '../x'"),
        ("triton PAIR models --environment nowhere", "environment = 'nowhere'"),
        ("triton PAIR models --rows x", "argument --rows"),
        (f"{TUNE} --method block,medusa", "--method"),
        (f"{TUNE} --quality-loss -0.1", "--quality-loss"),
        (f"{TUNE} --params {{", "argument --params:"),
        (f"{TUNE} --params {'[' * 50_000}", "argument --params:"),
        (f"{TUNE} --params '{{\"beam_width\": 2}}'", "--params"),
        (f"{TUNE} --prompts /no/such/file", "--prompts"),
        (f"{TUNE} --prompts few.jsonl", "--prompts"),  # no error could be given for a single one of a half
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    line: str,
    words: str,
    run: Run,
    pair_folders: Callable[[str], Path],
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "any"):
        Path(folder).mkdir()
    Path("any", "pair.json").write_text("{}")
    Path("broken.jinja").write_text("{% for %}")
    for file, count in (("few", 3), ("prompts", 4)):
        Path(f"{file}.jsonl").write_text(f"{json.dumps({'prompt': 'SELECT'})}\n" * count)
    names = dict(zip(("TARGET", "AUXILIARY"), map(str, checkpoints), strict=True))
    names["PAIR"] = str(pair_folders("torch"))
    arguments = shlex.split(line)
    for name, value in names.items():
        arguments = [one.replace(name, value) for one in arguments]
    before = sorted(tmp_path.rglob("*"))
    assert_refused(run(*arguments), arguments[0], words)
    assert sorted(tmp_path.rglob("*")) == before
