"""A real headless browser that opens a page from disk and reports its content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PHONE, DESKTOP = 400, 1280

SCREENSHOTS = os.environ.get("SCREENSHOTS", "screenshots" if "CI" in os.environ else "")
"""Folder of screenshots, relative to the checkout: an artefact of CI, ignored by git; empty to take none."""


@dataclass
class Opened:
    """One open page and all its errors."""

    page: Page
    errors: list[str]

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window; a phone would scroll sideways."""
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def keep(self, name: str) -> None:
        """Keep a picture of the whole page as `screenshots/NAME.png`, if any are to be kept."""
        if not SCREENSHOTS:
            return
        folder = Path(__file__).parents[2] / SCREENSHOTS
        folder.mkdir(exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png", full_page=True)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; without it the test is skipped with the reason, but fails in CI."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        assert "CI" not in os.environ, "CI has to install chromium: see .ci/run"
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not give.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = DESKTOP, dark: bool = False, touch: bool = False
) -> Iterator[Opened]:
    """Open a file from disk with the network off; `touch` where a finger is all that points."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        offline=True,
        has_touch=touch,
        is_mobile=touch,
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(f"fetched {request.url[:200]}"))
    page.goto(path.resolve().as_uri())
    yield Opened(page, errors)
    context.close()
