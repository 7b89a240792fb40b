"""The site builds without a dead link, and what a page names exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engines import kinds
from engines.folder import open_engine
from engines.kinds import Kind
from export.options import ExportOptions
from export.pair import export_pair
from mtad import LLM, RuntimeConfig
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.commands import generate
from runtime.commands.main import COMMANDS
from runtime.server.schema import CompletionRequest
from tests.support.pages import EVERY_PAGE, PAGES, TOP, assert_parses, blocks, commands
from tests.support.paths import ROOT
from tests.support.steps import make_step, some_tokens

DOCS = ROOT / "docs"
ROOMS = "docs|engines|export|mtad|runtime|scripts|tests"


def test_the_site_builds_strictly_and_a_dead_link_would_be_noticed(tmp_path: Path) -> None:
    """What is noticed is a warning, which ends a strict build."""
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as index:
        index.write("\n[page](nowhere.md) [place](methods.md#no-such-place)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in ran.stderr.splitlines() if line.startswith("WARNING")]
    assert ["nowhere.md" in said[0], "#no-such-place" in said[1], len(said), ran.returncode] == [True, True, 2, 1], said
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in (tmp_path / "site").glob("*.html")}


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", TOP, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    for link in links:
        assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"


@EVERY_PAGE
def test_every_path_and_extra_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(rf"`((?:{ROOMS})/[\w./-]*)`", text))
    for block in blocks(page):
        named |= set(re.findall(r"(?<![\w./-])(?:docs|scripts|tests)/[\w./-]+", block))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {name for names in re.findall(r"pip install -e '\.\[([\w,-]+)\]'", text) for name in names.split(",")}
    assert installed <= extras.keys()
    modules = {f"{name.replace('.', '/')}" for name in re.findall(r"python -m ((?:scripts|export)[\w.]*)", text)}
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    missing += [name for name in modules if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").is_file()]
    assert not missing, f"{page.name} names what is not there: {', '.join(missing)}"


@EVERY_PAGE
def test_every_option_that_a_page_gives_a_command_exists(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, *arguments in commands(page, "mtad "):
        assert_parses(importlib.import_module(COMMANDS[name][0]).main, arguments, monkeypatch)


@EVERY_PAGE
def test_python_on_a_page_imports_names_that_exist_and_gives_arguments_that_are_taken(page: Path) -> None:
    ours = {"DecodingParams": DecodingParams, "RuntimeConfig": RuntimeConfig, "LLM": inspect.signature(LLM).bind}
    shown = set(re.findall(r"^def (\w+)", page.read_text(), re.MULTILINE))
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} <= ours.keys():
                eval(ast.unparse(node), dict(ours))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOMS.split("|"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert name.name in shown or hasattr(module, name.name), (
                        f"{page.name} imports {name.name} from {node.module}"
                    )


@pytest.mark.parametrize("page", ["python-api.md", "deployment.md"])
def test_python_on_a_page_about_a_pair_runs_and_gives_what_the_page_says(
    page: str,
    pair_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "my-pair").symlink_to(pair_folders("torch"))
    monkeypatch.chdir(tmp_path)
    for block in blocks(DOCS / page, "python"):
        exec(compile(block, page, "exec"), {"__name__": "page"})
    printed, shown = capfd.readouterr().out, blocks(DOCS / page, "text")
    assert all(text in printed for text in shown[:1]), printed


def test_what_was_not_executed_is_said_on_one_page_only() -> None:
    """The README has a summary of that page."""
    said = [page.name for page in PAGES if re.search(r"\b(not|never)\s+(been\s+)?executed", page.read_text(), re.I)]
    assert set(said) <= {"support.md", "README.md", "index.md", "CHANGELOG.md", "CONTRIBUTING.md"}


def test_the_page_of_the_python_api_lists_every_decoding_parameter() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \| ", (DOCS / "python-api.md").read_text(), re.MULTILINE))
    defaults = {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(DecodingParams)
    }
    assert {name: ast.literal_eval(rows[name]) for name in defaults} == defaults


def test_every_front_door_describes_every_method(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mtad generate", "--help"])
    with pytest.raises(SystemExit):
        generate.main()
    helped = "".join(capsys.readouterr().out.split())
    offered = CompletionRequest.model_json_schema()["properties"]["method"]
    for name, method in METHODS.items():
        assert "".join(f"{name}: {method.help}".split()) in helped
        assert f"{name}: {method.help}" in offered["description"]
    assert set(METHODS) == set(offered["anyOf"][0]["enum"])


def test_the_example_of_a_new_engine_works(
    pair_folders: Callable[[str], Path], checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its folder and its row alone, a pair is exported to its format, verified and opened."""
    engine, row = (block for block in blocks(ROOT / "CONTRIBUTING.md") if "open_plain" in block)
    module = ModuleType("engines.plain.engine")
    monkeypatch.setitem(sys.modules, "engines.plain.engine", module)
    exec(compile(engine, "engine.py", "exec"), vars(module))
    names = {"Kind": Kind}
    files, _, call = row.partition("\n")
    exec(files, names)
    kind, (target, auxiliary) = eval(call, names), map(str, checkpoints)
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, kind))
    monkeypatch.setitem(kinds.FORMATS, kind.format, kind)
    export_pair(tmp_path / "pair", ExportOptions(target, auxiliary, format="plain", rows=2, capacity=128))
    plain, expected = open_engine(tmp_path / "pair" / "target"), open_engine(pair_folders("torch") / "target")
    assert isinstance(plain, module.PlainEngine)
    for step in (make_step(some_tokens(0, 20)[None], [0]), make_step(some_tokens(1, 3)[None], [20])):
        torch.testing.assert_close(plain.step(step), expected.step(step), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_examples_of_a_new_rule_and_of_a_new_filter_work(tmp_path: Path) -> None:
    """Functions, row, fields and tests, put where the page says, into a copy."""
    page = ROOT / "CONTRIBUTING.md"
    function, row, rule_test = (block for block in blocks(page) if "likely" in block)
    diff, filter_test = (block for block in blocks(page) if "n_sigma" in block)
    assert len((function + row + rule_test).splitlines()) <= 40
    shutil.copytree(ROOT / "mtad", tmp_path / "mtad", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    rules, table = tmp_path / "mtad" / "rules" / "chain.py", tmp_path / "mtad" / "methods.py"
    rules.write_text(f"{rules.read_text()}\n\n{function}")
    opening = "METHODS: dict[str, Method] = {\n"
    table.write_text(table.read_text().replace(opening, opening + row))
    tests = {"test_likely.py": rule_test, "test_n_sigma.py": filter_test}
    for name, test in tests.items():
        (tmp_path / name).write_text(test)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "NUMBA_CACHE_DIR": str(tmp_path),
            "NUMBA_OPT": "0",  # which is compiled sooner, and is not kept: nothing would read it again
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
