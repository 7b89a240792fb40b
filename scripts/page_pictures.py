"""Takes the pictures of the server's page, docs/results/page-answer.png and page-race.png, with the demo pair.

python -m scripts.page_pictures [--pair FOLDER]
"""

from __future__ import annotations

import os
import shutil
from io import BytesIO
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from runtime.commands.entry import Parser, command
from scripts.clients.served import served
from scripts.paths import RESULTS, ROOT

WIDTH, HEIGHT = 1280, 780


def opened(browser: Browser, url: str, scheme: Literal["light", "dark"], method: str = "") -> Page:
    """The page after the question of its examples was decoded, by this method where one is given.

    It is decoded three times, so that the length of drafts is settled.
    """
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    page.goto(url)
    page.locator("#parameter-method").select_option(method)
    for _ in range(3):
        page.get_by_role("button", name="A question").click()
        page.locator("#verdict small").wait_for()
        page.locator("#start:enabled").wait_for()
    return page


def keep(page: Page, name: str) -> None:
    """Write a picture of 128 colours, a third of the size."""
    Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(128).save(RESULTS / f"{name}.png", optimize=True)


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
        rejected = page.locator("#drafted .token").evaluate_all("all => all.map(one => one.token.rejected.length)")
        page.locator("#drafted .token").nth(rejected.index(max(rejected))).hover()
        keep(page, "page-answer")
        page = opened(browser, server.url, "dark", method="mtad")
        page.locator("#replay").click()
        page.locator("#drafted .token.own").nth(2).wait_for(state="attached")
        page.locator("#drafted [data-ghost]").first.wait_for()
        page.wait_for_timeout(150)
        keep(page, "page-race")
        browser.close()


if __name__ == "__main__":
    main()
