"""Take the pictures of the page for the documentation from a server that runs, with Debian's Chromium.

python docs/img/screenshots.py http://127.0.0.1:8000 --seed 3
"""

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

MOST_BYTES = 300_000
DESKTOP = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}


def main() -> None:
    """Three pictures: half-way in light, words masked in dark, and a phone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="where rmdm serve shows its page")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the pictures")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts")
    args = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no Chromium on the PATH; install it with: apt install chromium")
    link = f"{args.url.rstrip('/')}/#seed={args.seed}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = opened(browser, link, color_scheme="light", **DESKTOP)
        half_way(page)
        save(page, args.out / "page-light.png")
        page = opened(browser, link, color_scheme="dark", **DESKTOP)
        words = page.locator(".pane").last.locator(".text .token:is(.written, .given)")
        for number in (3, 5, 6):
            words.nth(number).click()
        page.mouse.move(0, 0)
        save(page, args.out / "page-dark.png")
        page = opened(browser, link, color_scheme="light", **PHONE)
        half_way(page)
        save(page, args.out / "page-phone.png")
        browser.close()


def opened(browser: Browser, link: str, **options: object) -> Page:
    """The page with its texts written and nothing lit any more."""
    page = browser.new_context(reduced_motion="reduce", **options).new_page()  # type: ignore[arg-type]
    page.goto(link)
    page.locator("#panes[aria-busy=false]").wait_for()
    page.locator(".text.resting").first.wait_for()
    if page.locator(".alert:not(:empty)").count():
        sys.exit(f"{link}: {page.locator('.alert:not(:empty)').first.inner_text()}")
    return page


def half_way(page: Page) -> None:
    """A step at which some words are written and others are not."""
    steps = int(page.locator("#scrub").get_attribute("max") or 0)
    page.locator("#scrub").fill(str((steps + 1) // 2))
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")


def save(page: Page, path: Path) -> None:
    """As PNG, packed as well as it can be."""
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, optimize=True)
    size = path.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{path}: {size} bytes are over the {MOST_BYTES} a picture of the documentation may have")
    print(f"{path}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
