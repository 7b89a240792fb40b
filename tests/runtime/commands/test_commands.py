"""The commands: what they print, and that any bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock, Timeout

from engines.pytorch.engine import TorchEngine
from mtad import LLM, DecodingParams, RuntimeConfig
from runtime.commands.entry import DECODING
from runtime.commands.terminal import print_figures
from runtime.scheduler.statistics import Counts, Statistics
from tests.support.commands import OPTIONS, Run, assert_refused
from tests.support.paths import ROOT

PARAMS = DecodingParams(max_tokens=8, seed=3, ignore_eos=True)


def said(err: str, llm: LLM, texts: int = 1) -> bool:
    """Whether standard error says what runs, in what memory, how fast, and that every text was cut at its limit."""
    figures = rf"\d+ tokens/s, [\d.]+ tokens per pass; {texts} of {texts} texts cut at --max-tokens 8\n"
    return re.fullmatch(re.escape(f"{llm.pair.runs_on}\n{llm.memory}\n") + figures, err) is not None


@pytest.fixture(scope="module")
def pair(pair_folders: Callable[[str], Path]) -> Path:
    return pair_folders("torch")


@pytest.fixture(scope="module")
def llm(pair: Path) -> LLM:
    return LLM(pair, RuntimeConfig(threads=1))


def test_prompts_come_from_arguments_files_or_standard_input(run: Run, pair: Path, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("How many\nsingers?", encoding="utf-8")
    both = run("generate", pair, "SELECT", "--file", file, *OPTIONS)
    asked = ["SELECT", file.read_text(), "where? 日本"]
    first, second, third = (result.text for result in llm.generate(asked, PARAMS))
    assert (both.code, both.out) == (0, f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n")
    assert said(both.err, llm, texts=2)
    typed = run("generate", pair, *OPTIONS, stdin=asked[2].encode())
    assert (typed.code, typed.out) == (0, third + "\n")
    assert said(typed.err, llm)


def test_json_is_one_object_a_prompt(run: Run, pair: Path, llm: LLM) -> None:
    outcome = run("generate", pair, "SELECT", "Ωμέγα", "--json", *OPTIONS)
    assert (outcome.code, "\nmemory: " in outcome.err) == (0, True)
    results = llm.generate(["SELECT", "Ωμέγα"], PARAMS)
    for line, result in zip(outcome.out.splitlines(), results, strict=True):
        values = json.loads(line)
        assert values.keys() == result.to_dict().keys()
        assert values["text"] == result.text
        assert values["token_ids"] == result.token_ids
        assert values["seed"] == 3
        assert values["statistics"]["tokens"] == 8


def test_options_that_have_no_effect_warn(run: Run, pair: Path) -> None:
    ran = run("generate", pair, "SELECT", *OPTIONS, "--branching", "2,1", "--top-logprobs", "2")
    assert ran.code == 0
    assert "warning: --branching has no effect with the method block\n" in ran.err, "the pair's own method"
    assert "warning: --top-logprobs has no effect without --json\n" in ran.err
    assert "warning" not in run("generate", pair, "SELECT", *OPTIONS, "--draft-len", "2").err


def test_a_reader_that_goes_away_ends_a_command_quietly() -> None:
    command = f"{sys.executable} -m runtime.commands.main --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        ("PYTHONIOENCODING=ascii {} 'print(chr(8364))'", ("\\u20ac\n", ""), 0),
        ("{} 'print(sys.stdin.read())' <&-", ("\n", ""), 0),
        ("{} 'print(1)' >&-", ("", ""), 0),
        ("{} 'print(1)' > /dev/full", ("", "mtad: failed: [Errno 28] No space left on device\n"), 1),
    ],
)
def test_text_that_cannot_be_written_and_input_that_is_closed_make_no_traceback(
    line: str, said: tuple[str, str], code: int
) -> None:
    program = "import sys; from runtime.commands import main; main._run = lambda: exec(sys.argv[1]); main.main()"
    command = line.format(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (*said, code)


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_help_shows_ten_options_and_the_rest_on_demand(run: Run, command: str) -> None:
    common, every = (run(command, option).out for option in ("--help", "--help-all"))
    names = {text: set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)) for text in (common, every)}
    assert len(names[common] - {"--help", "--help-all"}) == 10
    assert names[common] < names[every] >= {"--threads", "--max-waiting"}
    assert all(f"\n{title}:\n" in every for title in ("where it runs", *(DECODING if command != "serve" else ())))


def test_what_breaks_while_generating_is_one_line_and_exit_code_1(
    run: Run, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TorchEngine, step: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(TorchEngine, "enqueue", broken)
    outcome = run("generate", pair, "S", *OPTIONS)
    assert (outcome.code, outcome.out) == (1, "")
    last = outcome.err.splitlines()[-1]
    assert last.startswith("mtad generate: failed: ")
    assert last.endswith("the device is gone")
    assert "Traceback" not in outcome.err


def test_generate_refuses_prompts_that_are_no_text(run: Run, pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe")
    assert_refused(run("generate", pair, "--file", file), "generate", "cannot be read")
    assert_refused(run("generate", pair, stdin=b"\xff\xfe"), "generate", "prompt = 'standard input': cannot be read")
    assert_refused(run("generate", pair, stdin=b""), "generate", "prompt")


def test_a_folder_of_pairs_is_refused_with_their_names(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pair.json").touch()
    inside = f"it holds pairs; give one of {tmp_path / 'a'}, {tmp_path / 'b'}"
    assert_refused(run("generate", tmp_path, "S"), "generate", inside)


def test_a_checkpoint_is_exported_once_whatever_its_pair_is_opened_with_and_by_one_process_at_a_time(
    run: Run, checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTAD_CACHE", str(tmp_path))  # where no test has exported it
    folders: list[Path] = []

    def exported(folder: Path, *_: object, **__: object) -> bool:
        folders.append(folder)
        with pytest.raises(Timeout):
            FileLock(f"{folder}.lock").acquire(timeout=0)
        return False

    monkeypatch.setattr("export.pair.export_pair", exported)
    for option in ((), ("--rows", "2"), ("--capacity", "256")):
        run("generate", checkpoints[0], "S", *option)
    assert len(folders) == 3
    assert folders[0] == folders[1] != folders[2]


def test_more_tokens_than_a_row_holds_are_refused_before_the_pair_is_opened(
    run: Run, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.llm.LLM", None)
    assert_refused(run("generate", pair, "S", "--max-tokens", "192"), "generate", "must fit in 192")


def test_a_draft_that_no_row_holds_is_not_blamed_on_the_number_of_tokens(run: Run, pair: Path) -> None:
    wide = ("--max-draft-len", "64", "--max-beam-width", "64")
    assert_refused(run("generate", pair, "S", *wide), "generate", "--max-draft-len = ")


def test_a_path_that_cannot_be_looked_at_is_one_line(run: Run) -> None:
    """A prompt where the pair should be: longer than a file's name may be."""
    ran = run("generate", "a prompt " * 40)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "File name too long" in ran.err


def test_tokens_per_second_are_those_of_all_requests_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Two that ran one after the other, for two seconds each."""
    taken = Statistics(tokens=100, target_passes=50, draft_seconds=0.5, score_seconds=1.0, commit_seconds=0.5)
    both = Counts(draft_seconds=1.0, score_seconds=2.0, commit_seconds=1.0)
    results = [SimpleNamespace(statistics=taken, finish_reason="stop")] * 2
    print_figures(results, PARAMS, both)  # type: ignore[arg-type]
    assert capsys.readouterr().err == "50 tokens/s, 2.00 tokens per pass\n"


def export_options(checkpoints: tuple[Path, Path], folder: Path) -> list[str]:
    target, auxiliary = map(str, checkpoints)
    size = ["--rows", "2", "--capacity", "128", "--to", "torch"]
    return [str(folder), "--target", target, "--auxiliary", auxiliary, *size]


def test_export_prints_the_folder_and_again_does_nothing(
    run: Run, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    options = [*export_options(checkpoints, tmp_path / "pair"), "--defaults", '{"draft_len": 3, "max_tokens": 5}']
    for _ in range(2):
        outcome = run("export", *options)
        assert (outcome.code, outcome.out) == (0, f"{tmp_path / 'pair'}\n")
    generated = run("generate", tmp_path / "pair", "S", "--json", "--ignore-eos", "--threads", "1")
    assert json.loads(generated.out)["statistics"]["tokens"] == 5
