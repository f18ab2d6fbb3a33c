"""The page without a mouse, and for those who hear it: keyboard alone, and axe in light and dark."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.serving import Server
from tests.ui.watched import Watch, Watched


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_axe_finds_nothing(watch: Watch, server: Server, scheme: str, width: int):
    viewport = {"width": width, "height": 900}
    watched = watch(server, color_scheme=scheme, viewport=viewport, bypass_csp=True)  # axe comes as an inline script
    page = watched.open("#text=anna+was&seed=1&steps=4")
    page.locator(".text .written").first.click()
    page.locator("#more summary").click()
    page.locator("#code summary").click()
    assert violations(page) == []
    page.locator("#scrub").fill("2")
    page.get_by_role("radio", name="Between two").check()
    watched.settle()
    assert violations(page) == []
    page.locator("#text").fill("zebra")
    page.locator("#generate").click()
    page.get_by_role("radio", name="Like a text").check()
    watched.settle()
    assert violations(page) == []


def violations(page: Page) -> list[str]:
    """What breaks a rule, each with where."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def test_a_text_is_written_masked_and_refilled_with_the_keyboard_alone(calm: Watched):
    page = calm.open("#model=tiny-mdlm&seed=0&steps=4")
    page.get_by_label("Prompt").focus()
    page.keyboard.type("anna was [MASK:3] near the river .")
    page.keyboard.press("Enter")
    calm.settle()
    before = calm.text().split()
    assert len(before) == 9
    pressed = 0
    while page.locator(":focus").get_attribute("role") != "option":  # Tab reaches the text in few steps
        page.keyboard.press("Tab")
        pressed += 1
        assert pressed < 8
    for key in ("Home", "ArrowRight", "Space", "ArrowRight", "ArrowRight", "Shift+ArrowRight", "ArrowDown", "End"):
        page.keyboard.press(key)
    expect(page.locator("[role=option][aria-selected=true]")).to_have_count(3)
    expect(page.locator(".text [tabindex='0']")).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Refill 3 words")).to_be_focused()
    page.keyboard.press("Enter")
    calm.settle()
    after = calm.text().split()
    assert [after[i] for i in (0, 2, 5, 6, 7, 8)] == [before[i] for i in (0, 2, 5, 6, 7, 8)]
    expect(page.locator(":focus")).to_have_attribute("data-place", "1")
    page.keyboard.press("Space")
    page.keyboard.press("Escape")
    expect(page.locator("[role=option][aria-selected=true]")).to_have_count(0)


def test_the_scrubber_follows_the_arrow_keys(calm: Watched):
    page = calm.open("#model=tiny-mdlm&seed=0&steps=4")
    page.locator("#scrub").focus()
    page.keyboard.press("Home")
    expect(page.locator("#where")).to_have_text("step 0 of 4")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#where")).to_have_text("step 1 of 4")
    page.keyboard.press("End")
    expect(page.locator("#where")).to_have_text("step 4 of 4")


def test_words_say_what_they_are(calm: Watched):
    page = calm.open("#model=tiny-mdlm&text=anna+[MASK]+happy&seed=0&steps=2")
    options = page.get_by_role("listbox", name="Text by tiny-mdlm").get_by_role("option")
    expect(options.nth(0)).to_have_accessible_name("anna, given")
    written = page.locator(".text .token").nth(1)
    expect(options.nth(1)).to_have_accessible_name(
        f"{written.inner_text()}, {written.get_attribute('aria-label').split(', ')[1]}"
    )
    page.locator("#scrub").fill("0")
    expect(options.nth(1)).to_have_accessible_name("not written yet")
