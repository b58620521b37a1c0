"""Pictures of the pages that programs write, for the tutorials, and outputs in notebooks, for code hosts.

    python docs/_ext/pictures.py    # `make pictures`: trains for some minutes

The pages are shown by the Chromium that is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from notebooks import FOLDER, stored, temporary_runs
from playwright.sync_api import Browser, sync_playwright

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PICTURES = TUTORIALS / "pictures"
BUILD = Path(__file__).parents[2] / "build" / "pictures"
COMMANDS = (
    "train --config moe.yaml --run.name moe",
    "audit runs/moe --html audit.html",
    "demo",
)
PAGES = {
    "tokens": ("runs/moe/report.html", "#tokens", 346),
    "audit": ("audit.html", "h1", 580),
    "demo": ("demo.html", "h1", 604),
}
"""Name of a picture -> page, element at its top, and its height in pixels."""
WIDTH = 1040
NOTEBOOK_WIDTH = 760


def make_pages() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    tutorial = (TUTORIALS / "first_run.md").read_text(encoding="utf-8")
    config = re.findall(r"^```yaml\n(.*?)^```", tutorial, re.DOTALL | re.MULTILINE)[0]
    (BUILD / "moe.yaml").write_text(config, encoding="utf-8")
    for command in COMMANDS:
        program = [sys.executable, "-m", "moe_ffn.cli", *command.split()]
        subprocess.run(program, cwd=BUILD, check=True)


def take_pictures(browser: Browser) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, (path, top, height) in PAGES.items():
        page = browser.new_page(viewport={"width": WIDTH, "height": height})
        page.goto((BUILD / path).as_uri())
        page.locator(top).first.evaluate("element => element.scrollIntoView()")
        # The first document of the validation split begins with its author's address.
        page.add_style_tag(content=".routed pre:nth-child(-n+2) { display: none }")
        page.wait_for_timeout(500)  # the plots draw themselves
        page.screenshot(path=PICTURES / f"{name}.png")


def store_outputs(browser: Browser) -> None:
    """Write what the cells of the notebooks show into them; a code host does not run a script of a figure."""
    page = browser.new_page(viewport={"width": NOTEBOOK_WIDTH, "height": 600})

    def picture(html: str) -> bytes:
        page.set_content(f"<div style='padding: 4px; background: white'>{html}</div>")
        page.wait_for_timeout(500)
        return page.locator("div").first.screenshot()

    for path in sorted(FOLDER.glob("*.ipynb")):
        with temporary_runs():
            text = stored(path, picture)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make_pages()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take_pictures(browser)
        store_outputs(browser)
        browser.close()
