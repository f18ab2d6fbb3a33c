"""What the page says when something goes wrong, in one line beside the text."""

import http.client
import json
import re
import urllib.request
from urllib.parse import urlsplit

from playwright.sync_api import expect

from tests.serving import Server
from tests.ui.watched import KEY, Watch, Watched

ENDLESS = {"model": "tiny-mdlm", "seed": 0, "steps": 4096, "sampler": "max_prob", "remask": 0.9}
"""Thousands of runs of the network: longer than any of these tests looks at it."""


def test_what_the_server_refuses_is_said_in_both_panes_and_forgotten_after(watch: Watch, server: Server):
    watched = watch(server)
    page = watched.open()
    page.locator("#text").fill("zebra")
    page.locator("#generate").click()
    watched.settle()
    for alert in page.locator(".pane").get_by_role("alert").all():
        expect(alert).to_have_text(re.compile(r"^'zebra' is not in the model's vocabulary of \d+; .+$"))
    page.locator("#text").fill("")
    page.locator("#generate").click()
    watched.settle()
    expect(page.locator(".pane .alert:not(:empty)")).to_have_count(0)
    assert all(watched.texts())


def test_a_long_word_makes_a_short_message(watch: Watch, server: Server):
    watched = watch(server)
    page = watched.open("#model=tiny-mdlm")
    page.locator("#text").fill("zebra" * 1000)
    page.locator("#generate").click()
    watched.settle()
    alert = page.locator(".pane").get_by_role("alert")
    expect(alert).to_contain_text("zebrazebra")
    box = alert.bounding_box()
    assert box is not None
    assert box["height"] < 200
    assert alert.evaluate("one => one.scrollWidth <= one.clientWidth")


def begun(watched: Watched) -> int:
    """Open a text without end, wait for its first words, and say how many requests had been given up before."""
    before = given_up(watched)
    watched.page.goto(f"{watched.url}/#model=tiny-mdlm&steps=4096&sampler=max_prob&remask=0.9")
    expect(watched.page.locator(".text .token:not(.masked)")).not_to_have_count(0)
    return before


def given_up(watched: Watched) -> int:
    with urllib.request.urlopen(f"{watched.url}/metrics", timeout=60) as answer:
        found = re.search(r"^rmdm_cancelled_total (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def wait_until_given_up(watched: Watched, count: int) -> None:
    while given_up(watched) < count:
        watched.page.wait_for_timeout(20)


def test_a_text_can_be_stopped(watch: Watch, server: Server):
    watched = watch(server)
    before = begun(watched)
    watched.page.get_by_role("button", name="Stop").click()
    watched.settle()
    expect(watched.page.locator(".pane").get_by_role("alert")).to_have_text("Stopped.")
    expect(watched.page.locator("#generate")).to_be_focused()
    expect(watched.page.locator("#where")).not_to_contain_text("of 4096")
    wait_until_given_up(watched, before + 1)


def test_a_new_request_ends_the_old_one(watch: Watch, server: Server):
    watched = watch(server)
    before = begun(watched)
    watched.page.locator("#steps").fill("4")
    watched.page.locator("#steps").press("Tab")
    watched.settle()
    expect(watched.page.locator("#where")).to_have_text("step 4 of 4")
    wait_until_given_up(watched, before + 1)


def test_a_server_that_is_gone(watch: Watch, server: Server):
    watched = watch(server)
    page = watched.open("#model=tiny-mdlm")
    page.context.set_offline(True)
    page.locator("#another").click()
    watched.settle()
    place = urlsplit(server.url).netloc
    expect(page.locator(".pane").get_by_role("alert")).to_have_text(
        f"No answer from {place}; is rmdm serve still running there?"
    )


def test_a_key_is_asked_for_kept_in_the_tab_and_left_out_of_links(watch: Watch, strict_server: Server):
    watched = watch(strict_server)
    page = watched.page
    page.goto(strict_server.url)
    field = page.get_by_label("This server asks for an API key")
    expect(field).to_be_focused()
    field.fill("wrong")
    field.press("Enter")
    expect(page.locator("#notice")).not_to_be_empty()
    expect(field).to_be_visible()
    field.fill(KEY)
    field.press("Enter")
    watched.settle()
    assert watched.text()
    expect(field).to_be_hidden()
    expect(page.locator("#notice")).to_be_empty()
    assert KEY not in page.url
    assert KEY not in page.content()
    page.locator("#code summary").click()
    expect(page.locator("#curl")).to_contain_text("Bearer $RMDM_API_KEY")
    expect(page.locator("#python")).to_contain_text('os.environ["RMDM_API_KEY"]')
    page.reload()
    watched.settle()
    assert watched.text()  # the tab still knows it
    other = watch(strict_server)
    other.page.goto(page.url)
    expect(other.page.get_by_label("This server asks for an API key")).to_be_visible()


def test_without_models_there_is_nothing_to_use_but_the_key(watch: Watch, strict_server: Server):
    watched = watch(strict_server)
    page = watched.page
    page.goto(strict_server.url)
    expect(page.get_by_label("This server asks for an API key")).to_be_focused()
    usable = page.locator(":is(button, input, select, textarea):visible:enabled")
    assert usable.evaluate_all("all => all.map((one) => one.form?.id)") == ["key", "key"]
    for name in ("generate", "another", "own", "text"):
        page.locator(f"#{name}").click(force=True)
        page.keyboard.press("Enter")
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    assert watched.faults == [refused]
    assert watched.sent == []


def test_a_key_that_cannot_be_one_is_refused_in_the_form(watch: Watch, strict_server: Server):
    watched = watch(strict_server)
    page = watched.page
    page.goto(strict_server.url)
    field = page.get_by_label("This server asks for an API key")
    for key in ("schlüssel", "ключ"):
        field.fill(key)
        field.press("Enter")
        expect(page.locator("#notice")).to_have_text("A key has plain ASCII characters only; this one has others.")
        expect(field).to_be_focused()
        assert page.evaluate("() => sessionStorage.length") == 0
    field.fill(KEY)
    field.press("Enter")
    watched.settle()
    expect(page.locator("#notice")).to_be_empty()
    expect(page.locator("#generate")).to_be_enabled()


def test_a_key_is_asked_for_again_where_the_models_cannot_be_listed(watch: Watch, strict_server: Server):
    watched = watch(strict_server)
    page = watched.page
    page.goto(strict_server.url)
    field = page.get_by_label("This server asks for an API key")
    field.fill("wrong")
    field.press("Enter")
    expect(page.locator("#notice")).to_contain_text("missing or wrong")
    expect(field).to_be_focused()
    assert page.evaluate("() => sessionStorage.length") == 0  # what the server refuses is forgotten
    page.context.set_offline(True)
    field.fill(KEY)
    field.press("Enter")
    expect(page.locator("#notice")).to_contain_text("No answer from")
    expect(field).to_be_focused()
    page.context.set_offline(False)
    field.fill(KEY)
    field.press("Enter")
    watched.settle()
    assert watched.text()
    expect(field).to_be_hidden()


def test_a_full_queue(watch: Watch, strict_server: Server):
    watched = watch(strict_server)
    page = watched.page
    page.goto(strict_server.url)
    field = page.get_by_label("This server asks for an API key")
    field.fill(KEY)
    field.press("Enter")
    watched.settle()
    taken = [post(strict_server, ENDLESS), post(strict_server, ENDLESS)]
    page.locator("#another").click()
    watched.settle()
    expect(page.locator(".pane").get_by_role("alert")).to_have_text(
        re.compile(r"no more are taken; try again in \d+ s")
    )
    for connection in taken:
        connection.close()


def post(server: Server, body: dict[str, object]) -> http.client.HTTPConnection:
    """A request whose answer has begun, or waits in the queue."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    while True:
        connection.request("POST", "/v1/denoise", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 429:  # a text that was just finished may still have its place
            break
        answer.read()
    answer.readline()
    return connection
