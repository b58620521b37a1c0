"""Pictures of the pages that programs write, for the tutorials.

    python docs/_ext/pictures.py    # `make pictures`: trains the run of the first tutorial, a minute or two

The pages are shown by the Chromium that is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PICTURES = TUTORIALS / "pictures"
BUILD = Path(__file__).parents[2] / "build" / "pictures"
COMMANDS = (
    "train --config moe.yaml --run.name moe",
    "audit runs/moe --html audit.html",
    "demo",
)
PAGES = {
    "tokens": ("runs/moe/report.html", "#tokens", 620),
    "audit": ("audit.html", "h1", 620),
    "demo": ("demo.html", "h1", 620),
}
"""Name of a picture -> page, element at its top, and its height in pixels."""
WIDTH = 1000


def make_pages() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    tutorial = (TUTORIALS / "first_run.md").read_text(encoding="utf-8")
    config = re.findall(r"^```yaml\n(.*?)^```", tutorial, re.DOTALL | re.MULTILINE)[0]
    (BUILD / "moe.yaml").write_text(config, encoding="utf-8")
    for command in COMMANDS:
        program = [sys.executable, "-m", "moe_ffn.cli", *command.split()]
        subprocess.run(program, cwd=BUILD, check=True)


def take_pictures() -> None:
    PICTURES.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (path, top, height) in PAGES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            page.goto((BUILD / path).as_uri())
            page.locator(top).first.evaluate("element => element.scrollIntoView()")
            page.wait_for_timeout(500)  # the plots draw themselves
            page.screenshot(path=PICTURES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    make_pages()
    take_pictures()
