"""The page of `rmdm serve`: a text is denoised, scrubbed, masked and refilled, compared, shared."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from playwright.sync_api import Page, expect

from tests.release import LENGTH
from tests.serving import Server
from tests.ui.watched import Watch, Watched, ask


def at_step(page: Page, step: int, of: int) -> None:
    expect(page.locator("#where")).to_have_text(f"step {step} of {of}")


def test_it_opens_with_a_text_of_each_of_two_models(calm: Watched, server: Server):
    page = calm.open()
    expect(page.locator(".pane")).to_have_count(2)
    assert [(sent["model"], sent["seed"], sent["steps"]) for sent in calm.sent] == [
        ("tiny-mdlm", 0, 5),
        ("tiny-rmdm", 0, 5),
    ]
    answers = [ask(f"{server.url}/v1/completions", body)["choices"][0]["text"] for body in calm.sent]
    assert calm.texts() == answers
    at_step(page, 5, 5)
    for pane in page.locator(".pane").all():
        expect(pane.locator(".used")).to_contain_text("5 steps · ancestral · temperature 1 · seed 0")


def test_scrubbing_shows_each_step_as_it_was(calm: Watched, server: Server):
    page = calm.open("#model=tiny-mdlm&seed=4&steps=6")
    told = ask(f"{server.url}/v1/denoise", {"model": "tiny-mdlm", "seed": 4, "steps": 6, "stream": False})
    written = page.locator(".text .token:not(.masked)")
    for step in (0, 2, 5, 6):
        page.locator("#scrub").fill(str(step))
        at_step(page, step, 6)
        new = [token for event in told["steps"][:step] for token in event["rows"][0]["new"]]
        expect(written).to_have_count(len(new))
        expect(page.locator(".text .token.masked")).to_have_count(LENGTH - len(new))
    expect(page.locator("#scrub")).to_have_attribute("aria-valuetext", "step 6 of 6")
    page.locator("#scrub").fill("3")
    lit = {
        int(place) for place in page.locator(".text .fresh").evaluate_all("all => all.map(one => one.dataset.place)")
    }
    assert lit == {token["at"] for token in told["steps"][2]["rows"][0]["new"]}


def test_it_plays_pauses_and_announces_the_end_only(watch: Watch, server: Server):
    watched = watch(server, reduced_motion="no-preference")
    page = watched.open("#model=tiny-mdlm&seed=1&steps=16")
    expect(page.locator("#said")).to_have_text(f"tiny-mdlm: {told(server, seed=1, steps=16)}")
    expect(page.locator("#play")).to_have_accessible_name("Pause")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_accessible_name("Play")
    where = page.locator("#where").inner_text()
    assert where != "step 16 of 16"
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    at_step(page, 16, 16)
    expect(page.locator("#play")).to_have_accessible_name("Play")
    assert watched.text() == told(server, seed=1, steps=16)
    watched.check()


def told(server: Server, **body: object) -> str:
    return ask(f"{server.url}/v1/completions", {"model": "tiny-mdlm", **body})["choices"][0]["text"]


def test_masked_words_are_refilled_and_the_others_stay(calm: Watched):
    page = calm.open("#model=tiny-rmdm&text=anna+was+happy+near+the+river+[MASK:2]+.&seed=2")
    before = calm.text().split()
    tokens = page.locator(".text [role=option]")
    tokens.nth(1).click()
    tokens.nth(3).click()
    tokens.nth(5).click(modifiers=["Shift"])
    expect(page.locator(".text [aria-selected=true]")).to_have_count(4)
    page.get_by_role("button", name="Refill 4 words").click()
    calm.settle()
    kept = [before[i] if i in (0, 2) else None for i in range(6)] + before[6:]
    assert calm.sent[-1]["infill"] == f"anna[MASK] happy[MASK:3] {' '.join(before[6:])}"
    after = calm.text().split()
    assert len(after) == len(before)
    assert [word if kept[i] else None for i, word in enumerate(after)] == kept
    expect(page.locator(".text .given")).to_have_count(len(before) - 4)
    expect(page.locator("#text")).to_have_value(calm.sent[-1]["infill"])
    page.locator(".text [role=option]").nth(1).click()
    page.get_by_role("button", name="Keep all").click()
    expect(page.locator(".text [aria-selected=true]")).to_have_count(0)


def test_each_refill_has_a_seed_of_its_own_which_the_link_keeps(calm: Watched, watch: Watch, server: Server):
    page = calm.open("#text=anna+was+[MASK:4]+the+river+.&seed=2")
    anew = page.locator(".pane").first.get_by_text("both texts are written anew")
    expect(anew).to_be_hidden()
    for _ in range(3):
        page.locator(".pane").first.locator("[role=option]").nth(3).click()
        expect(anew).to_be_visible()
        page.get_by_role("button", name="Refill 1 word").click()
        calm.settle()
    seeds = [sent["seed"] for sent in calm.sent]
    assert seeds[::2] == seeds[1::2]  # the same for both
    assert len(set(seeds)) > 2  # two of them may be equal by chance
    again = watch(server)
    again.open(page.url.removeprefix(f"{server.url}/"))
    assert again.texts() == calm.texts()
    page.get_by_label("Compare two models").uncheck()
    calm.settle()
    page.locator("[role=option]").nth(3).click()
    expect(page.get_by_role("button", name="Refill 1 word")).to_be_visible()
    expect(anew).to_be_hidden()


def test_a_pane_says_that_it_fits_a_latent_until_the_first_step(calm: Watched):
    page = calm.open("#model=tiny-rmdm&text=anna+was+[MASK:2]+the+river+.")
    page.locator("[role=option]").nth(2).click()
    expect(page.locator(".readout")).to_contain_text("probability")
    page.evaluate(
        """() => {
            window.read = [];
            const hear = (all) => all.forEach((one) => window.read.push(one.addedNodes[0]?.data ?? ""));
            new MutationObserver(hear).observe(document.querySelector(".readout"), {childList: true});
        }"""
    )
    page.get_by_role("button", name="Refill 1 word").click()
    calm.settle()
    fitting = "Fitting the latent to the words that are given…"
    read = page.evaluate("() => window.read")
    assert fitting in read
    begun = read.index("Waiting for the first step…")
    assert begun < read.index(fitting)
    assert not any("probability" in said for said in read[begun:])  # nothing of the word that was there
    expect(page.locator(".readout")).to_have_text("Click words to mask them.")


def test_only_gaps_are_filled_with_fewer_rounds_than_by_default(calm: Watched):
    page = calm.open("#model=tiny-rmdm&text=anna+was")
    assert "rounds" not in calm.sent[-1]
    page.locator("#text").fill("anna [MASK:2] happy")
    page.locator("#generate").click()
    calm.settle()
    assert calm.sent[-1]["rounds"] == 8


def test_coming_back_the_controls_show_what_is_used(watch: Watch, server: Server):
    watched = watch(server)
    page = watched.open("#steps=4&temperature=0.5")
    page.locator("#sampler").select_option("max_prob")
    watched.settle()
    page.locator("#speed").select_option("4")
    page.goto("about:blank")
    page.go_back()
    watched.settle()
    expect(page.locator("#speed")).to_have_value("1")
    expect(page.locator("#sampler")).to_have_value("max_prob")
    expect(page.locator("#temperature")).to_have_value("0.5")


def test_a_prompt_begins_the_texts_of_both(calm: Watched):
    page = calm.open()
    page.locator("#text").fill("anna was")
    page.locator("#text").press("Enter")
    calm.settle()
    assert [sent["prompt"] for sent in calm.sent[-2:]] == ["anna was"] * 2
    assert all(text.startswith("anna was") for text in calm.texts())
    expect(page.locator(".pane").first.locator(".given")).to_have_text(["anna", "was"])


def test_any_two_models_are_compared_or_one_is_shown(calm: Watched):
    page = calm.open("#seed=3&steps=4")
    page.get_by_label("Model 1").select_option("tiny-rmdm")  # where the other pane has it, the two change places
    calm.settle()
    assert [sent["model"] for sent in calm.sent[-2:]] == ["tiny-rmdm", "tiny-mdlm"]
    page.get_by_label("Model 2").select_option("tiny-ar")
    calm.settle()
    first, second = calm.sent[-2:]
    assert (first["steps"], first["seed"], second["seed"]) == (4, 3, 3)
    assert "steps" not in second  # it takes one a token
    at_step(page, LENGTH, LENGTH)
    page.get_by_label("Compare two models").uncheck()
    calm.settle()
    expect(page.locator(".pane")).to_have_count(1)
    assert "model=tiny-rmdm&seed=3" in page.url


def test_an_autoregressive_model_says_that_it_fills_no_gaps(calm: Watched):
    page = calm.open("#model=tiny-ar&model=tiny-mdlm&text=anna+[MASK:2]+.")
    alert = page.locator(".pane").first.get_by_role("alert")
    expect(alert).to_have_text("tiny-ar writes from left to right: it continues a prompt and fills no gaps.")
    assert [sent["model"] for sent in calm.sent] == ["tiny-mdlm"]
    assert calm.text(1).startswith("anna")


def test_a_link_shows_the_same_texts_again(calm: Watched, watch: Watch, server: Server):
    page = calm.open("#seed=8&steps=3")
    page.locator("#sampler").select_option("max_prob")
    calm.settle()
    page.locator("#temperature").fill("0.6")
    page.locator("#temperature").press("Tab")
    calm.settle()
    page.locator("#text").fill("tom was")
    page.get_by_role("button", name="New latent").click()
    calm.settle()
    link, texts = page.url, calm.texts()
    again = watch(server)
    again.open(link.removeprefix(f"{server.url}/"))
    assert again.texts() == texts
    assert again.sent == calm.sent[-2:]
    assert again.page.url == link
    expect(again.page.locator("#sampler")).to_have_value("max_prob")
    again.page.goto(f"{server.url}/#model=tiny-mdlm&seed=9")  # another link in the same tab
    expect(again.page.locator(".pane")).to_have_count(1)
    again.settle()
    assert again.sent[-1]["seed"] == 9
    again.check()


def test_a_link_that_cannot_be_met_says_why(calm: Watched):
    page = calm.open("#model=gone&model=tiny-mdlm&seed=-1&sampler=best")
    expect(page.locator("#notice")).to_have_text(
        "The link is about gone, which is not served here. "
        "The link’s seed=-1 is not a whole number from 0 to 9007199254740991; it is left out. "
        "The link’s sampler=best is none of ancestral, spaced, max_prob, margin, entropy, balanced, ar; it is left out."
    )
    assert [(sent["model"], sent["seed"]) for sent in calm.sent] == [("tiny-mdlm", 0)]


def test_settings_are_sent_and_given_back(calm: Watched):
    page = calm.open("#model=tiny-rmdm")
    page.locator("#more summary").click()
    for name, value in {"steps": "7", "seed": "12", "temperature": "0.5", "guidance": "2", "top_p": "0.9"}.items():
        page.locator(f"#{name}").fill(value)
        page.locator(f"#{name}").press("Tab")
        calm.settle()
    expected = {"model": "tiny-rmdm", "seed": 12, "steps": 7, "temperature": 0.5, "guidance": 2, "top_p": 0.9}
    assert calm.sent[-1] == expected
    page.locator("#steps-range").press("ArrowRight")
    calm.settle()
    assert calm.sent[-1]["steps"] > 7
    page.get_by_role("button", name="Back to the models’ own settings").click()
    calm.settle()
    assert calm.sent[-1] == {"model": "tiny-rmdm", "seed": 12, "steps": 5}
    count = len(calm.sent)
    page.locator("#seed").fill("-3")
    page.locator("#seed").press("Tab")
    page.locator("#generate").click()
    assert len(calm.sent) == count  # the browser itself says what is wrong


def test_spacing_is_asked_of_the_spaced_order_alone_and_what_it_writes_anew_is_shown(calm: Watched):
    page = calm.open("#model=tiny-mdlm&steps=6")
    page.locator("#more summary").click()
    expect(page.locator("#spacing")).to_be_hidden()
    page.locator("#sampler").select_option("spaced")
    page.locator("#spacing").fill("3")
    page.locator("#spacing").press("Tab")
    calm.settle()
    assert calm.sent[-1] == {"model": "tiny-mdlm", "seed": 0, "steps": 6, "sampler": "spaced", "spacing": 3}
    expect(page.locator(".used")).to_contain_text("6 steps · spaced 3 apart · temperature 1")
    told = ask(f"{calm.url}/v1/denoise", {**calm.sent[-1], "stream": False})
    for step in (3, 6):
        page.locator("#scrub").fill(str(step))
        at_step(page, step, 6)
        expect(page.locator(".text .token.masked")).to_have_count(0)
        last = {token["at"]: token["text"] for event in told["steps"][:step] for token in event["rows"][0]["new"]}
        shown = page.locator(".text .token").evaluate_all("all => all.map(one => one.textContent.trim())")
        assert shown == [last[at].strip() for at in sorted(last)][: len(shown)]
    page.locator("#sampler").select_option("ancestral")
    calm.settle()
    assert calm.sent[-1] == {"model": "tiny-mdlm", "seed": 0, "steps": 6, "sampler": "ancestral"}


def test_latent_and_words_change_apart(calm: Watched):
    page = calm.open("#seed=6")
    plain, drawn = calm.texts()
    page.get_by_role("button", name="New latent").click()
    calm.settle()
    mdlm, rmdm = calm.sent[-2:]
    assert rmdm["seed"] == mdlm["seed"] == 6
    assert rmdm["latent_seed"] != 6
    assert "latent_seed" not in mdlm
    assert calm.text(0) == plain
    expect(page.locator(".pane").first.locator(".used")).to_contain_text("no latent")
    held = rmdm["latent_seed"]
    page.get_by_role("button", name="New words").click()
    calm.settle()
    assert calm.sent[-1]["latent_seed"] == held
    assert calm.sent[-1]["seed"] != 6
    page.get_by_role("button", name="New seed").click()
    calm.settle()
    assert "latent_seed" not in calm.sent[-1]
    page.locator("#seed").fill("6")
    page.locator("#seed").press("Enter")
    calm.settle()
    assert calm.texts() == [plain, drawn]


def test_between_two_latents(calm: Watched):
    page = calm.open("#model=tiny-rmdm&seed=1")
    at_a = calm.text()
    page.get_by_role("button", name="Keep this latent as A").click()
    page.locator("#latent_seed").fill("2")
    page.locator("#latent_seed").press("Enter")
    calm.settle()
    at_b = calm.text()
    page.get_by_role("button", name="Keep this latent as B").click()
    page.get_by_role("radio", name="Between two").check()
    calm.settle()
    assert calm.sent[-1]["between"] == [{"seed": 1}, {"seed": 2}]
    for weight, text in ((0, at_a), (1, at_b)):
        page.locator("#weight").fill(str(weight))
        expect(page.locator(".used")).to_have_text(re.compile(rf"latent at {weight} "))
        calm.settle()
        assert calm.sent[-1]["weight"] == weight
        assert calm.text() == text
    assert "from=1&to=2&weight=1" in page.url


def test_write_like_a_text(calm: Watched):
    page = calm.open("#model=tiny-rmdm&seed=3")
    page.get_by_role("radio", name="Like a text").check()
    page.get_by_label("A text to write like").fill("tom was sad near the farm .")
    page.locator("#latent").get_by_role("button", name="Write like this").click()
    calm.settle()
    assert calm.sent[-1]["like"] == "tom was sad near the farm ."
    shown = calm.text()
    page.locator(".pane").get_by_role("button", name="Write like this").click()
    calm.settle()
    assert calm.sent[-1]["like"] == shown
    assert calm.sent[-1]["seed"] != 3


def test_link_curl_and_python_are_copied_and_work(watch: Watch, server: Server):
    watched = watch(server, permissions=["clipboard-read", "clipboard-write"])
    page = watched.open("#model=tiny-mdlm&model=tiny-rmdm&text=anna+was&seed=5&steps=4&latent_seed=9")
    texts = watched.texts()

    def copied(name: str, said: str) -> str:
        page.get_by_role("button", name=name).click()
        expect(page.locator("#copied")).to_have_text(said)
        return page.evaluate("() => navigator.clipboard.readText()")

    assert copied("Copy link", "Link copied") == page.url
    words = shlex.split(copied("Copy curl", "curl command copied"))
    bodies = [json.loads(words[i + 1]) for i, word in enumerate(words) if word == "-d"]
    assert [ask(words[2], body)["choices"][0]["text"] for body in bodies] == texts
    python = copied("Copy Python", "Python copied")
    watched.check()
    pytest.importorskip("openai")
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == texts, done.stderr


def test_nothing_is_wider_than_the_screen(calm: Watched):
    page = calm.open()
    page.locator("#more summary").click()
    page.locator("#code summary").click()
    for width in (360, 600, 768, 1056, 1280, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        beyond = page.locator("main *:not(pre, .unseen)").evaluate_all(
            "(all, width) => all.filter(one => one.getBoundingClientRect().right > width).map(one => one.outerHTML)",
            width,
        )
        assert beyond == []


def test_the_server_forbids_what_the_page_does_not_need(server: Server, calm: Watched):
    answer = calm.page.goto(server.url)
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert not re.search("unsafe|https?:|data:", policy)
    calm.settle()
