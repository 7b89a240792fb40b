"""The page at /, in a real browser: what it shows is what the stream says."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from mtad import LLM, DecodingParams
from tests.support.live_server import MODEL, LiveServer, gated, live
from tests.support.waiting import PATIENCE, own, until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""Names on the PATH; without any of them, playwright's own is taken."""
ALONE = ("--disable-quic", "--disable-sync", "--disable-gpu")
"""Beside what playwright gives anyway (no updates, no first run, a new profile): nothing is asked of a network."""
DESKTOP, PHONE = ViewportSize(width=1280, height=800), ViewportSize(width=390, height=844)
pytestmark = pytest.mark.slow
PROMPT = "SELECT naïve 日本 🙂"
PARAMS = DecodingParams(
    method="mtad", draft_len=4, max_tokens=60, seed=5, ignore_eos=True, temperature=1.3, top_k=0, draft_details=True
)
FIELDS = {
    "method": "mtad",
    "draft_len": "4",
    "max_tokens": "60",
    "seed": "5",
    "ignore_eos": "true",
    "temperature": "1.3",
    "top_k": "0",
}
expect.set_options(timeout=1000 * PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None and not Path(playwright.chromium.executable_path).is_file():
            pytest.skip("NOT TESTED: no browser; scripts/test.sh installs one where it may")
        launched = playwright.chromium.launch(executable_path=found, args=[*sandbox, *ALONE], timeout=1000 * PATIENCE)
        yield launched
        launched.close()


@contextmanager
def opened(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The page of a server; anything it says on the console but what a test expects fails."""
    page = browser.new_page(viewport=DESKTOP)
    said, asked = list[str](), list[str]()
    page.set_default_timeout(1000 * PATIENCE)
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    yield page
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], "it is as wide as the screen"
    page.close()
    assert all(url.startswith((server.url, "data:")) for url in asked), "nothing comes from elsewhere"
    assert [text for text in said if "400" not in text and "401" not in text] == []


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The page of the server that all tests share."""
    with opened(browser, server) as page:
        yield page


def give(page: Page, **values: str) -> None:
    for name, value in values.items():
        field = page.locator(f"#parameter-{name}")
        field.wait_for(state="attached")
        if not field.is_visible():
            page.click("#panel > summary")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def race(page: Page, **values: str) -> None:
    page.fill("#prompt", PROMPT)
    page.locator("#mode").select_option("text")
    give(page, **values)
    page.click("#start")


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(selector, "all => all.map(one => one.textContent)")
    return found


def test_both_answers_are_shown_token_by_token_and_the_race_ends_with_its_sentence(plain: LLM, page: Page) -> None:
    # before the server decodes on the same engines
    expected, other = (plain.generate(PROMPT, one)[0] for one in (PARAMS, replace(PARAMS, method="sample")))
    race(page, **FIELDS)
    passes = expected.statistics.target_passes
    expect(page.locator("#verdict")).to_contain_text(f"{passes} passes instead of 60, ")
    expect(page.locator("#verdict")).to_contain_text("times as fast.")
    for side, result in (("drafted", expected), ("plain", other)):
        assert "".join(texts(page, f"#{side} .token")) == result.text
        assert len(texts(page, f"#{side} .token.drafted")) == result.statistics.accepted
        passes = result.statistics.target_passes
        assert f"60 tokens in {passes} passes, {60 / passes:.2f} per pass" in page.inner_text(f"#{side} .figures")
        assert float(page.inner_text(f"#{side} .speed b")) > 0
    colours = {
        kind: page.eval_on_selector(f"#drafted .{kind}", "span => getComputedStyle(span).backgroundColor")
        for kind in ("drafted", "own")
    }
    assert len(set(colours.values())) == 2, "the two origins can be told apart"
    shown = texts(page, "#drafted .token")  # a token that ends within a character shows nothing
    at, one = next((n, one) for n, one in enumerate(expected.details) if one.accepted and shown[n].strip())
    assert one.accepted
    page.locator("#drafted .token").nth(at).hover()
    expect(page.locator("#tip")).to_contain_text(f"drafted by {one.accepted.beams} of 4 beams")
    expect(page.locator("#tip")).to_contain_text(f"p target{math.exp(expected.logprobs[at]):.3f}")
    expect(page.locator("#tip")).to_contain_text(f"q auxiliary{one.accepted.q:.3f}")
    page.mouse.move(0, 0)
    expect(page.locator("#tip")).to_be_hidden()
    page.focus("#drafted pre")
    at = next(n for n, one in enumerate(expected.details) if one.rejected)
    for _ in range(at + 1):
        page.keyboard.press("ArrowRight")
    rejected = expected.details[at].rejected[0]
    expect(page.locator("#tip")).to_contain_text(f"p {rejected.p:.3f}, q {rejected.q:.3f}")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    page.click("#replay")  # shows what was rejected for a moment
    expect(page.locator("#drafted [data-ghost]").first).to_be_attached()
    expect(page.locator("#verdict")).to_contain_text("passes instead of 60, ")
    expect(page.locator("[data-ghost]")).to_have_count(0)


def test_every_parameter_can_be_given_and_its_default_is_shown(server: LiveServer, page: Page) -> None:
    expect(page.locator("#examples button")).to_have_count(3)
    expect(page.locator("#key")).to_be_hidden()
    model = server.client.models.retrieve(MODEL).to_dict()["mtad"]
    names = set(page.eval_on_selector_all("[data-name]", "all => all.map(field => field.dataset.name)"))
    assert names == model["parameters"].keys() - {"n", "top_logprobs", "prompt_logprobs"}
    assert page.get_attribute("#parameter-top_k", "placeholder") == str(model["parameters"]["top_k"]["default"])
    assert page.get_attribute("#parameter-max_tokens", "placeholder") == "what fits", "as a request without it gets"
    assert page.locator("#parameter-beam_width").is_hidden(), "the method does not use it"
    give(page, method="mtad")
    assert page.get_attribute("#parameter-accept_threshold", "placeholder") == "0.5", "the method's own"
    page.focus("#parameter-beam_width")
    assert "Number of beams in the draft" in page.inner_text("#help")


def test_an_error_is_shown_in_the_servers_words_and_a_refused_message_stays_in_its_field(page: Page) -> None:
    race(page, draft_len="99")
    expect(page.locator("#error")).to_contain_text("draft_len = 99")
    give(page, draft_len="many")
    page.click("#start")
    expect(page.locator("#error")).to_contain_text("draft_len")
    expect(page.locator("#start")).to_be_enabled()
    page.click("#chat-tab")
    give(page, draft_len="99")
    page.fill("#message", "How many")
    page.click("#send")
    expect(page.locator("#error")).to_contain_text("draft_len = 99")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#message")).to_have_value("How many")


def test_stopping_cancels_the_request(plain: LLM, browser: Browser) -> None:
    llm = own(plain)
    with gated(llm) as (server, gate), opened(browser, server) as page:
        race(page, max_tokens="170", ignore_eos="true", method="sample", seed="5")
        until(lambda: server.statistics["running"] + server.statistics["waiting"] == 1)
        gate.let(20)
        expect(page.locator("#drafted .token").nth(3)).to_be_attached()
        until(lambda: gate.holds)
        page.click("#stop")
        until(lambda: server.leaving == 1)
        gate.open()
        until(lambda: llm.loop.totals.requests["cancelled"] == 1)
        expect(page.locator("#start")).to_be_enabled()
        assert page.locator("#error").is_hidden()
        assert page.locator("#verdict").inner_text() == "", "nobody has won"


def test_a_chat_keeps_the_conversation_as_far_as_it_fits(plain: LLM, page: Page) -> None:
    page.focus("#race-tab")
    page.keyboard.press("ArrowRight")
    give(page, **FIELDS | {"max_tokens": "12"})
    params, text = replace(PARAMS, max_tokens=12), ""
    for count, message in enumerate(("How many", "So?"), 1):
        page.fill("#message", message)
        expect(page.locator("#send")).to_be_enabled()
        page.locator("#message").dispatch_event("keydown", {"key": "Enter", "keyCode": 229})  # takes a suggestion
        expect(page.locator(".message")).to_have_count(2 * count - 2)
        page.keyboard.press("Enter")
        expect(page.locator(".message .figures").nth(count - 1)).to_contain_text("ended by length")
        text += f"[user] {message}\n[assistant] "
        said = plain.generate(text, params)[0].text
        assert "".join(texts(page, f".message:nth-child({2 * count}) .token")) == said
        text += f"{said}\n"
    while not page.locator(".note").count():
        count += 1
        assert count < 20, "the context is never full"
        page.fill("#message", "And what then? " * 4)
        page.click("#send")
        expect(page.locator(".message .figures").nth(count - 1)).to_contain_text("ended by")
    page.fill("#message", "Still there?")
    page.click("#send")
    expect(page.locator(".message .figures").nth(count)).to_contain_text("ended by length")
    assert page.locator("#error").is_hidden()
    page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)


def test_the_plain_lane_drafts_nothing_in_thoughts_either(plain: LLM, browser: Browser) -> None:
    defaults = replace(plain.pair.defaults, thinking_method="mtad", thinking_tags=("<think>", "</think>"))
    llm = LLM(replace(plain.pair, defaults=defaults))
    with live(llm) as server, opened(browser, server) as page:
        asked = list[Any]()
        page.on("request", lambda request: asked.append(request.post_data_json))
        race(page, max_tokens="3")
        expect(page.locator("#verdict")).to_contain_text("times as fast.")
    methods = [(one.get("method"), one.get("thinking_method")) for one in asked if one]
    assert methods == [(None, None), ("sample", "sample")]


def test_a_long_answer_is_followed_unless_the_reader_has_scrolled_away(plain: LLM, browser: Browser) -> None:
    with gated(own(plain)) as (server, gate), opened(browser, server) as page:
        page.set_viewport_size(ViewportSize(width=390, height=200))
        page.click("#chat-tab")
        give(page, max_tokens="120", ignore_eos="true", method="sample", temperature="1.3", top_k="0")
        page.fill("#message", "How many")
        page.click("#send")
        gate.let(90)
        expect(page.locator(".message .token").nth(70)).to_be_attached()
        expect(page.locator(".message .figures")).to_be_in_viewport()
        page.evaluate("scrollTo(0, 0)")
        gate.open()
        expect(page.locator(".message .figures")).to_contain_text("ended by length")
        assert page.evaluate("scrollY") == 0


def test_text_of_a_model_is_text_alone(page: Page) -> None:
    evil = "<img src=x onerror=document.title='gone'>"
    race(page, regex=evil.replace(".", r"\."))
    expect(page.locator("#verdict")).to_contain_text("times as fast.")
    page.click("#chat-tab")
    page.fill("#message", evil)
    page.click("#send")
    expect(page.locator(".message .figures")).to_contain_text("ended by stop")
    for shown in ("#drafted .token", "#plain .token", ".message.assistant .token", ".message.user"):
        assert "".join(texts(page, shown)) == evil
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "MTAD"


def test_a_server_with_keys_is_asked_with_one(plain: LLM, browser: Browser) -> None:
    with live(own(plain), api_keys=("secret",)) as server, opened(browser, server) as page:
        expect(page.locator("#error")).to_contain_text("API key")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#error")).to_be_hidden()
        race(page, max_tokens="3")
        expect(page.locator("#verdict")).to_contain_text("times as fast.")


def test_the_page_is_small() -> None:
    folder = Path(__file__).parents[3] / "runtime" / "server" / "page"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 40_000
