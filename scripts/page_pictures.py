"""Takes the pictures of the server's page, docs/results/page-answer.png and page-race.png, with the demo pair.

python -m scripts.page_pictures [--pair FOLDER]
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from runtime.commands.entry import Parser, command
from scripts.clients.served import served
from scripts.paths import RESULTS, ROOT

WIDTH, HEIGHT = 1280, 780


def opened(browser: Browser, url: str, scheme: str) -> Page:
    """The page, after the question among its examples was decoded twice; once before, so that nothing is new to it."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    for _ in range(2):
        page.get_by_role("button", name="A question").click()
        page.locator("#verdict small").wait_for()
    return page


@command
def main() -> None:
    parser = Parser(prog="scripts.page_pictures", description="Pictures of the page of mtad serve.")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    options = parser.parse_args()
    with served(options.pair) as server, sync_playwright() as playwright:
        found = shutil.which("chromium")
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=[*sandbox, "--disable-gpu"])
        page = opened(browser, server.url, "light")
        page.locator("#parameter-method").select_option("mmtad")
        page.locator("#start").click()
        page.locator("#verdict small").wait_for()
        beams = page.locator("#drafted .token.drafted").evaluate_all("all => all.map(one => one.token.accepted.beams)")
        page.locator("#drafted .token.drafted").nth(beams.index(min(beams, key=lambda count: abs(count - 3)))).hover()
        page.screenshot(path=RESULTS / "page-answer.png")
        page = opened(browser, server.url, "dark")
        page.locator("#replay").click()
        page.locator("#drafted .token.own").nth(2).wait_for(state="attached")
        page.locator("#drafted [data-ghost]").first.wait_for()
        page.wait_for_timeout(150)
        page.screenshot(path=RESULTS / "page-race.png")
        browser.close()


if __name__ == "__main__":
    main()
