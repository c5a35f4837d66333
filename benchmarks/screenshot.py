"""Take a picture of the first screen of the report, for docs/cpu-speed.md.

    make report && python benchmarks/screenshot.py

Writes docs/report.png and docs/report-dark.png. Needs Chromium: the system's, or playwright's.
"""

import pathlib
import shutil

from playwright.sync_api import sync_playwright

ROOT = pathlib.Path(__file__).parent.parent
SIZE = {"width": 1120, "height": 860}


def main() -> None:
    system = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        for name, scheme in (("report", "light"), ("report-dark", "dark")):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto((ROOT / "report" / "index.html").as_uri())
            page.screenshot(path=ROOT / "docs" / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
