"""The page at /, in a real browser: what it shows is what the stream says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from runtime import LLM, DecodingParams
from tests.support.live_server import MODEL, LiveServer, gated, live
from tests.support.waiting import PATIENCE, own, until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""Names on the PATH; without any of them, playwright's own is taken."""
ALONE = ("--disable-quic", "--disable-sync", "--disable-gpu")
"""Beside what playwright gives anyway (no updates, no first run, a new profile): nothing is asked of a network."""
pytestmark = pytest.mark.slow
PROMPT = "SELECT naïve 日本 🙂"
expect.set_options(timeout=1000 * PATIENCE)


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    with live(own(plain)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None and not Path(playwright.chromium.executable_path).is_file():
            pytest.skip("NOT TESTED: no browser; scripts/environment.sh installs one where it may")
        launched = playwright.chromium.launch(executable_path=found, args=[*sandbox, *ALONE], timeout=1000 * PATIENCE)
        yield launched
        launched.close()


@contextmanager
def opened(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The page of a server; anything it says on the console but what a test expects fails."""
    page, said, asked = browser.new_page(), list[str](), list[str]()
    page.set_default_timeout(1000 * PATIENCE)
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    yield page
    page.close()
    assert all(url.startswith((server.url, "data:")) for url in asked), "nothing comes from elsewhere"
    assert [text for text in said if "400" not in text and "401" not in text] == []


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The page of the server that all tests share."""
    with opened(browser, server) as page:
        yield page


def spans(page: Page, side: str) -> list[tuple[str, str]]:
    """(class, text) of each coloured piece."""
    found: list[Any] = page.eval_on_selector_all(f"#{side} span", "all => all.map(s => [s.className, s.textContent])")
    return [(kind, text) for kind, text in found]


def fill(page: Page, **values: str) -> None:
    page.fill("#prompt", PROMPT)
    for name, value in values.items():
        field = page.locator(f"#parameter-{name}")
        if not field.is_visible():
            page.click("summary")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def test_both_texts_are_shown_coloured_by_origin_with_their_figures(plain: LLM, page: Page) -> None:
    fill(page, method="mtad", max_tokens="60", seed="5", ignore_eos="true", top_k="0", temperature="1.3")
    page.click("#start")
    expect(page.locator("#plain-figures")).to_contain_text("ended by length")
    expect(page.locator("#ratio")).to_contain_text("times the tokens/s")
    params = DecodingParams(max_tokens=60, seed=5, ignore_eos=True, top_k=0, temperature=1.3)
    for side, method in (("drafted", "mtad"), ("plain", "sample")):
        expected = plain.generate(PROMPT, replace(params, method=method))[0]
        shown = spans(page, side)
        assert "".join(text for _, text in shown) == expected.text
        assert {kind for kind, _ in shown} == ({"accepted", "bonus"} if method == "mtad" else {"bonus"})
        figures, statistics = page.inner_text(f"#{side}-figures"), expected.statistics
        assert f"{statistics.block_efficiency:.2f} tokens a target pass" in figures
        assert ("of drafts accepted" in figures) == (method == "mtad")
        assert "60 tokens, " in figures
    colours = {
        kind: page.eval_on_selector(f"#drafted .{kind}", "span => getComputedStyle(span).backgroundColor")
        for kind in ("accepted", "bonus")
    }
    assert len(set(colours.values())) == 2, "the two origins can be told apart"


def test_every_parameter_can_be_given_and_its_default_is_shown(server: LiveServer, page: Page) -> None:
    expect(page.locator("#parameter-seed")).to_be_visible()
    expect(page.locator("#key")).to_be_hidden()
    model = server.client.models.retrieve(MODEL).to_dict()["mtad"]
    names = set(page.eval_on_selector_all("[data-name]", "all => all.map(field => field.dataset.name)"))
    assert names == model["parameters"].keys() - {"n", "top_logprobs"}
    assert page.get_attribute("#parameter-top_k", "placeholder") == str(model["parameters"]["top_k"]["default"])
    assert "gamma" in (page.get_attribute("#parameter-draft_len", "title") or "")


def test_an_error_is_shown_in_the_servers_words(page: Page) -> None:
    fill(page, draft_len="99")
    page.click("#start")
    expect(page.locator("#error")).to_contain_text("draft_len = 99")
    page.fill("#parameter-draft_len", "many")
    page.click("#start")
    expect(page.locator("#error")).to_contain_text("draft_len")
    expect(page.locator("#start")).to_be_enabled()


def test_stopping_cancels_the_request(plain: LLM, browser: Browser) -> None:
    llm = own(plain)
    with gated(llm) as (server, gate), opened(browser, server) as page:
        fill(page, max_tokens="170", ignore_eos="true", method="sample", seed="5")
        page.check("#together")
        page.click("#start")
        until(lambda: server.statistics["running"] + server.statistics["waiting"] == 2)
        gate.let(20)  # several for each, though one may have begun before the other
        expect(page.locator("#plain span").nth(3)).to_be_attached()
        page.click("#stop")
        until(lambda: server.leaving == 2)
        gate.open()
        until(lambda: llm.loop.totals.requests["cancelled"] == 2)
        expect(page.locator("#start")).to_be_enabled()
        assert page.locator("#error").is_hidden()


def test_a_server_with_keys_is_asked_with_one(plain: LLM, browser: Browser) -> None:
    with live(own(plain), api_keys=("secret",)) as server, opened(browser, server) as page:
        expect(page.locator("#error")).to_contain_text("API key")
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key", "secret")
        page.fill("#prompt", "S")
        page.click("#start")
        expect(page.locator("#plain-figures")).to_contain_text("ended by")
