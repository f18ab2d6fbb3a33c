"""Judges: what counts as an answer, who is asked, and what happens when the server misbehaves."""

import email.utils
import itertools
import json
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from rmdm.errors import ConfigError
from rmdm.evaluation.judge.cache import Cache
from rmdm.evaluation.judge.client import Answer, CallError, Client, Manners, retry_after
from rmdm.evaluation.judge.names import PRESETS, Judge, choose_judges
from rmdm.evaluation.judge.panel import PROMPT, Panel, Verdict, read_prompt
from rmdm.evaluation.judge.scores import (
    CRITERIA,
    BadAnswer,
    agreement,
    mean_and_half_width,
    read_scores,
    spearman,
)
from rmdm.evaluation.judge.texts import TextSet, agreement_rows, read_texts, score_rows
from tests.judge_server import always, good, judge_server, scores_of

GOOD = '{"fluency":3,"coherence":4,"repetition":5,"readability":6,"overall":7}'
QUICK = Manners(concurrency=4, retries=2, timeout=5.0, backoff=0.01)
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def judge_at(url: str, model: str = "fake") -> Judge:
    return Judge(model, model, url, None)


def panel_at(url: str, folder, manners: Manners = QUICK, **changes) -> Panel:
    return Panel([judge_at(url)], read_prompt(None), Cache(folder), manners, **changes)


def question(text: str) -> str:
    return read_prompt(None).replace("{text}", text)


def quiet(line: str) -> None:
    """Nobody reads along."""


class TestAnswers:
    @pytest.mark.parametrize("said", [GOOD, f"\n {GOOD}\n", f"```json\n{GOOD}\n```", f"```\n{GOOD}```"])
    def test_five_numbers_are_read_as_they_stand(self, said):
        assert list(read_scores(said).values()) == [3, 4, 5, 6, 7]

    def test_halves_are_kept_and_other_keys_ignored(self):
        assert read_scores(GOOD.replace("3", "3.5").replace("}", ',"why":"dull"}'))["fluency"] == 3.5

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            ("", "empty"),
            (f"Here you are: {GOOD}", "not JSON alone"),
            (f"{GOOD}\n{GOOD}", "not JSON alone"),
            (GOOD[:-1], "not JSON alone"),
            ("[1,2,3,4,5]", "no JSON object"),
            ("7", "no JSON object"),
            (GOOD.replace(',"overall":7', ""), "no overall"),
            (GOOD.replace("7", '"7"'), "overall is no number"),
            (GOOD.replace("7", "true"), "overall is no number"),
            (GOOD.replace("7", "null"), "overall is no number"),
            (GOOD.replace("7", "NaN"), "NaN is no number"),
            (GOOD.replace("}", ',"overall":2}'), "a key twice"),
            ("[" * 100_000, "not JSON alone"),
        ],
    )
    def test_anything_else_is_malformed_and_not_guessed(self, said, reason):
        with pytest.raises(BadAnswer, match=reason) as caught:
            read_scores(said)
        assert not caught.value.is_out_of_range

    @pytest.mark.parametrize("score", ["0", "11", "-1", "10.01", "1e400"])
    def test_out_of_range_is_told_apart(self, score):
        with pytest.raises(BadAnswer, match=r"overall=.* is outside 1..10") as caught:
            read_scores(GOOD.replace("7", score))
        assert caught.value.is_out_of_range

    def test_an_answer_that_ran_out_of_tokens_says_so(self):
        assert Verdict.of(Answer('{"flu', True, 1, 1)).reason == "cut off at max_tokens"


class TestFigures:
    def test_mean_and_interval_by_hand(self):
        assert mean_and_half_width([2, 4, 4, 6]) == (4, pytest.approx(3.18245 * math.sqrt(8 / 3) / 2))
        assert mean_and_half_width([5]) == (5, None)
        assert mean_and_half_width([]) == (None, None)

    def test_interval_covers_the_mean_in_95_of_100_samples(self):
        rng = np.random.default_rng(0)
        scores = rng.choice([1, 2, 3, 6], p=[0.4, 0.3, 0.2, 0.1], size=(1000, 256))
        covered = 0
        for row in scores:
            mean, half = mean_and_half_width(row.tolist())
            assert mean is not None
            assert half is not None
            covered += abs(mean - 2.2) < half
        assert 925 < covered < 975

    def test_spearman_equals_scipy_with_many_ties(self):
        rng = np.random.default_rng(1)
        a_N = rng.integers(1, 4, 256).astype(float)
        b_N = np.clip(a_N + rng.integers(-1, 2, 256), 1, 10)
        assert spearman(a_N, b_N) == pytest.approx(stats.spearmanr(a_N, b_N).statistic)
        rho, low, high = agreement(a_N.tolist(), b_N.tolist())
        assert rho is not None
        assert low is not None
        assert high is not None
        assert low < rho < high
        assert agreement(a_N.tolist(), (-a_N).tolist())[0] == pytest.approx(-1)

    def test_agreement_is_undefined_where_a_judge_tells_nothing_apart(self):
        assert agreement([1, 1, 1, 1], [1, 2, 3, 4]) == (None, None, None)
        assert agreement([1, 2], [1, 2]) == (None, None, None)

    def test_rows_count_every_text_and_average_only_scores(self):
        panel = Panel([judge_at("http://x", name) for name in "ab"], "{text}", Cache(PROMPT))
        scored = {text: Verdict(dict.fromkeys(CRITERIA, float(k + 1))) for k, text in enumerate("pqrs")}
        faults = {
            "t": Verdict(fault="malformed"),
            "u": Verdict(fault="out_of_range"),
            "v": Verdict(fault="failed"),
        }
        verdicts = {"a": scored | faults, "b": {**scored, **faults, "s": Verdict(fault="failed")}}
        texts = TextSet("mine", [*"pqrstuv", "p"], {"steps": 4})
        a, b = score_rows(texts, panel, verdicts)
        assert (a["arm"], a["steps"], a["judge"]) == ("mine", 4, "a")
        assert (a["n"], a["judged"], a["malformed"], a["out_of_range"], a["failed"]) == (8, 5, 1, 1, 1)
        assert a["overall"] == pytest.approx((1 + 2 + 3 + 4 + 1) / 5)
        assert (b["judged"], b["failed"]) == (4, 2)
        (both,) = agreement_rows("mine", texts.texts, verdicts)
        assert (both["judge"], both["other"], both["n"]) == ("a", "b", 3)
        assert both["spearman"] == pytest.approx(1)


class TestNames:
    def test_presets_are_the_papers_two_judges(self):
        assert choose_judges([]) == [PRESETS["deepseek-v4-flash"]]
        both = choose_judges(["deepseek-v4-flash", "gemini-3.1-flash-lite"])
        assert [judge.key_env for judge in both] == ["DEEPSEEK_API_KEY", "GEMINI_API_KEY"]
        assert all(judge.url.startswith("https://") for judge in both)

    def test_what_is_said_of_one_judge_wins_over_what_is_said_of_all(self):
        a, b = choose_judges(
            ["org/a:1@http://one/v1/", "b@https://two:8000/v1/chat/completions"],
            key_envs=["b=B_KEY", "none"],
            options=['b={"temperature": null, "seed": 1}', '{"max_tokens": 9}'],
            prices=["2", "b=1,3"],
        )
        assert (a.model, a.url, a.key_env, a.price) == ("org/a:1", "http://one/v1", None, (2, 2))
        assert (b.model, b.url, b.key_env, b.price) == ("b", "https://two:8000/v1", "B_KEY", (1, 3))
        assert a.options == {"temperature": 0, "max_tokens": 9}
        assert b.options == {"max_tokens": 9, "seed": 1}

    def test_a_base_url_holds_for_presets_and_for_other_names(self):
        preset, other = choose_judges(["deepseek-v4-flash", "mine"], base_url="http://proxy/v1")
        assert {preset.url, other.url} == {"http://proxy/v1"}
        assert preset.options == PRESETS["deepseek-v4-flash"].options

    def test_one_model_in_two_places_is_two_judges(self):
        assert [j.name for j in choose_judges(["m@http://a", "m@http://b"])] == ["m@http://a", "m@http://b"]

    @pytest.mark.parametrize(
        ("words", "more", "message"),
        [
            (["deepseek"], {}, "judge 'deepseek' is no preset .did you mean 'deepseek-v4-flash'"),
            (["m@ftp://a"], {}, "'ftp://a' is no base URL"),
            (["m@http://"], {}, "is no base URL"),
            (["m@http://a:99999"], {}, "is no base URL"),
            (["m@http://a b"], {}, "is no base URL"),
            ([f"m@http://{'a' * 70}.org"], {}, "is no base URL"),
            (["m@http://a", "m@http://a/"], {}, "names a judge twice"),
            (["m@http://a"], {"key_envs": ["n=KEY"]}, "--key-env n=KEY: 'n' is no judge here"),
            (["m@http://a"], {"options": ["[1]"]}, "is no JSON object"),
            (["m@http://a"], {"options": ['{"n": 2}']}, "sets 'n', which this program sets itself"),
            (["m@http://a"], {"prices": ["cheap"]}, "--price cheap is no price"),
            (["m@http://a"], {"prices": ["-1"]}, "--price -1 is no price"),
        ],
    )
    def test_mistakes_are_named(self, words, more, message):
        with pytest.raises(ConfigError, match=message):
            choose_judges(words, **more)

    def test_keys_come_from_the_environment_and_are_never_shown(self, monkeypatch):
        judge = replace(judge_at("http://a"), key_env="SOME_KEY")
        monkeypatch.setenv("SOME_KEY", f" {KEY}\n")
        assert judge.key() == KEY
        monkeypatch.setenv("SOME_KEY", f"{KEY} {KEY}")
        with pytest.raises(ConfigError) as caught:
            judge.key()
        assert KEY not in str(caught.value)
        monkeypatch.delenv("SOME_KEY")
        with pytest.raises(ConfigError, match="SOME_KEY is not set"):
            judge.key()


class TestPrompt:
    def test_ours_has_the_papers_criteria_and_delimiters(self):
        prompt = read_prompt(None)
        assert all(f"- {name}: " in prompt for name in CRITERIA)
        assert prompt.endswith("<<<TEXT\n{text}\nTEXT>>>")
        assert "minified JSON" in prompt

    def test_braces_of_a_text_are_left_alone(self, tmp_path):
        (tmp_path / "mine.txt").write_text('answer {"overall":N} about {text}\n')
        panel = replace(panel_at("http://x", tmp_path), prompt=read_prompt(tmp_path / "mine.txt"))
        assert panel.question("{a} {text}") == 'answer {"overall":N} about {a} {text}'

    def test_a_prompt_without_a_place_for_the_text_is_refused(self, tmp_path):
        (tmp_path / "mine.txt").write_text("rate it")
        with pytest.raises(ConfigError, match=r"holds \{text\} 0 times"):
            read_prompt(tmp_path / "mine.txt")


class TestClient:
    def test_a_request_says_what_the_judge_needs_and_no_more(self):
        with judge_server() as server:
            judge = replace(judge_at(server.url), options={"temperature": 0.5})
            answer = Client(judge, KEY, QUICK).ask(question("été \ud800"))
        (call,) = server.calls
        assert read_scores(answer.content) == scores_of("été \ud800", "fake")
        assert (answer.tokens_in, answer.tokens_out) == (100, 30)
        assert call.body.keys() == {"model", "messages", "temperature"}
        assert call.headers["Authorization"] == f"Bearer {KEY}"

    def test_without_a_key_none_is_sent(self):
        with judge_server() as server:
            Client(judge_at(server.url), None, QUICK).ask(question("a"))
        assert "Authorization" not in server.calls[0].headers

    @pytest.mark.parametrize(
        "fault", ["500", "503", "429", "408", "close", "half", "no JSON", "no choices", "hang", "drip"]
    )
    def test_what_may_pass_is_tried_again(self, fault):
        with judge_server(lambda text, attempt: "ok" if attempt == 2 else fault) as server:
            seconds = 1.0 if fault in ("hang", "drip") else QUICK.timeout
            client = Client(judge_at(server.url), None, replace(QUICK, timeout=seconds))
            assert read_scores(client.ask(question("a")).content) == scores_of("a", "fake")
        assert len(server.calls) == 3

    @pytest.mark.parametrize("fault", ["500", "429", "close", "half", "hang", "drip"])
    def test_and_given_up_after_all_tries(self, fault):
        with judge_server(always(fault)) as server, pytest.raises(CallError) as caught:
            Client(judge_at(server.url), None, replace(QUICK, timeout=0.1 if fault in ("hang", "drip") else 5.0)).ask(
                question("a")
            )
        assert len(server.calls) == 1 + QUICK.retries
        assert not caught.value.hopeless
        assert ("gave no answer in 0.1 s" in str(caught.value)) == (fault in ("hang", "drip"))

    def test_pauses_double(self):
        with judge_server(always("500")) as server, pytest.raises(CallError):
            Client(judge_at(server.url), None, replace(QUICK, retries=3, backoff=0.1)).ask(question("a"))
        pauses = [later - earlier for earlier, later in itertools.pairwise(server.times("a"))]
        assert all(pause >= 0.05 * 2**k for k, pause in enumerate(pauses))
        assert len(pauses) == 3

    def test_retry_after_is_honoured_by_every_caller(self):
        def behave(text: str, attempt: int) -> str:
            return "429+1" if (text, attempt) == ("a", 0) else "ok"

        with judge_server(behave) as server:
            client = Client(judge_at(server.url), None, QUICK)
            first = threading.Thread(target=client.ask, args=(question("a"),))
            first.start()
            while client._not_before == 0:
                time.sleep(0.001)
            client.ask(question("b"))
            first.join()
        refused, again = server.times("a")
        assert again - refused >= 1
        assert server.times("b")[0] - refused >= 1

    def test_retry_after_may_be_a_date(self):
        assert 97 < retry_after(email.utils.formatdate(time.time() + 100, usegmt=True)) <= 100
        assert retry_after("7") == 7
        assert retry_after("-7") == 0
        assert retry_after("soon") is None
        assert retry_after(None) is None

    def test_a_server_that_asks_for_too_long_a_wait_is_left_in_peace(self):
        with judge_server(always("429+9999")) as server, pytest.raises(CallError, match="asks to wait 9999 s"):
            Client(judge_at(server.url), None, QUICK).ask(question("a"))
        assert len(server.calls) == 1

    @pytest.mark.parametrize(
        ("fault", "hopeless"),
        [("400", False), ("403", False), ("401", True), ("402", True), ("404", True), ("302", True)],
    )
    def test_refusals_are_not_tried_again_and_hide_the_key(self, fault, hopeless):
        with judge_server(always(fault)) as server, pytest.raises(CallError) as caught:
            Client(judge_at(server.url), KEY, QUICK).ask(question("a"))
        assert f"HTTP {fault} (refused with Bearer ***)" in str(caught.value)
        assert len(server.calls) == 1
        assert caught.value.hopeless is hopeless
        assert KEY not in str(caught.value)

    def test_blank_lines_before_an_answer_do_not_matter(self):
        with judge_server(always("blank lines first")) as server:
            answer = Client(judge_at(server.url), None, QUICK).ask(question("a"))
        assert read_scores(answer.content) == scores_of("a", "fake")

    def test_nobody_there(self):
        with judge_server() as server:
            pass
        with pytest.raises(CallError, match=r"cannot be reached .Connection refused") as caught:
            Client(judge_at(server.url), None, QUICK).ask(question("a"))
        assert caught.value.hopeless
        assert server.url in str(caught.value)


class TestPanel:
    def test_every_text_is_asked_about_once_however_often_it_occurs(self, tmp_path):
        texts = [f"text {k % 5}" for k in range(12)]
        with judge_server() as server:
            verdicts, tallies = panel_at(server.url, tmp_path).hear(texts, quiet)
            assert set(server.count().values()) == {1}
            assert {text: verdict.scores for text, verdict in verdicts["fake"].items()} == {
                text: scores_of(text, "fake") for text in texts
            }
            assert (tallies["fake"].calls, tallies["fake"].answered) == (5, 5)
            again, tallies = panel_at(server.url, tmp_path).hear(texts, quiet)
            assert len(server.calls) == 5
            assert tallies["fake"].calls == 0
        assert again == verdicts

    def test_no_more_calls_at_once_than_allowed(self, tmp_path):
        with judge_server(always("slow")) as server:
            panel_at(server.url, tmp_path, replace(QUICK, concurrency=3)).hear([f"{k}" for k in range(16)], quiet)
        assert server.most_at_once == 3

    def test_faults_are_told_apart_and_kept_until_asked_for_again(self, tmp_path):
        faults = {"b": "out of range", "c": "sorry, no", "d": "400", "e": "cut", "f": "500"}
        is_better = False

        def behave(text: str, attempt: int) -> str:
            return "ok" if is_better else faults.get(text, "ok")

        with judge_server(behave) as server:
            verdicts, _ = panel_at(server.url, tmp_path).hear("abcdef", quiet)
            found = [verdicts["fake"][text].fault for text in "abcdef"]
            assert found == [None, "out_of_range", "malformed", "failed", "malformed", "failed"]
            assert server.count() == dict.fromkeys("abcde", 1) | {"f": 3}
            is_better = True
            assert panel_at(server.url, tmp_path).hear("abcdef", quiet)[0] == verdicts
            assert len(server.calls) == 8
            verdicts, tallies = panel_at(server.url, tmp_path, retry=True).hear("abcdef", quiet)
            assert tallies["fake"].calls == 5
            assert server.count()["a"] == 1
            assert all(verdict.scores is not None for verdict in verdicts["fake"].values())

    @pytest.mark.parametrize(("fault", "calls"), [("401", 1), ("400", 3), ("500", 9)])
    def test_a_judge_that_answers_nothing_is_given_up_and_asked_again_next_time(self, tmp_path, fault, calls):
        texts = [f"{k}" for k in range(40)]
        with judge_server(always(fault)) as server:
            verdicts, tallies = panel_at(server.url, tmp_path).hear(texts, quiet)
            assert len(server.calls) == calls
            assert {verdict.fault for verdict in verdicts["fake"].values()} == {"failed"}
            assert verdicts["fake"]["39"].reason == f"not asked: {tallies['fake'].given_up}"
            server.behave = good
            verdicts, _ = panel_at(server.url, tmp_path).hear(texts, quiet)
        assert all(verdict.scores is not None for verdict in verdicts["fake"].values())

    def test_a_judge_that_dies_on_the_way_keeps_what_it_said(self, tmp_path):
        texts = [f"{k}" for k in range(60)]
        with judge_server(lambda text, attempt: "ok" if int(text) < 10 else "402") as server:
            verdicts, tallies = panel_at(server.url, tmp_path).hear(texts, quiet)
            assert sum(verdict.scores is not None for verdict in verdicts["fake"].values()) == 10
            assert len(server.calls) <= 10 + QUICK.concurrency
            assert "HTTP 402" in str(tallies["fake"].given_up)
            server.behave = good
            panel_at(server.url, tmp_path).hear(texts, quiet)
        assert all(server.count()[text] == 1 for text in texts[:10])

    def test_outages_end_after_some_failures_in_a_row(self, tmp_path):
        texts = [f"{k}" for k in range(100)]
        with judge_server(lambda text, attempt: "ok" if text == "0" else "500") as server:
            panel = panel_at(server.url, tmp_path, replace(QUICK, retries=0))
            panel.hear(texts, quiet)
            assert len(server.calls) < 30
            server.behave = good
            verdicts, _ = panel.hear(texts, quiet)
        assert all(verdict.scores is not None for verdict in verdicts["fake"].values())

    def test_texts_that_are_refused_one_by_one_are_no_outage(self, tmp_path):
        texts = [f"{k:03}" + "long" * (k < 60) for k in range(80)]
        with judge_server(lambda text, attempt: "400" if "long" in text else "ok") as server:
            verdicts, tallies = panel_at(server.url, tmp_path).hear(texts, quiet)
            assert tallies["fake"].given_up is None
            assert set(server.count().values()) == {1}
            assert sum(verdict.scores is not None for verdict in verdicts["fake"].values()) == 20
            panel_at(server.url, tmp_path).hear(texts, quiet)
        assert len(server.calls) == 80

    def test_an_unforeseen_error_in_a_worker_is_raised(self, tmp_path):
        with judge_server() as server:
            panel = panel_at(server.url, tmp_path)
            panel.hear(["a"], quiet)
            for first in "0123456789abcdef":
                for second in "0123456789abcdef":
                    folder = tmp_path / f"{first}{second}"
                    if not folder.exists():
                        folder.write_text("no folder")
            with pytest.raises(OSError, match=r"exists|Not a directory"):
                panel.hear([f"{k}" for k in range(40)], quiet)

    def test_the_estimate_counts_calls_tokens_and_money(self, tmp_path):
        panel = panel_at("http://x", tmp_path)
        judge = replace(panel.judges[0], price=(1.0, 10.0))
        texts = ["word " * 100] * 60
        line = panel.estimate(judge, texts, 70)
        tokens = 60 * len(panel.question(texts[0])) // 4
        assert f"60 calls for 70 texts, about {tokens:,} tokens in and 2,400 out" in line
        assert f"cost {(tokens + 10 * 2400) / 1e6:,.4f}" in line


class TestCache:
    def test_answers_belong_to_text_judge_and_prompt(self, tmp_path):
        cache, judge = Cache(tmp_path), judge_at("http://a")
        asked = [
            (judge, "p", "t"),
            (judge, "p", "u"),
            (judge, "q", "t"),
            (judge, "pt", ""),
            (replace(judge, model="other"), "p", "t"),
            (replace(judge, url="http://b"), "p", "t"),
            (replace(judge, options={}), "p", "t"),
        ]
        assert len({cache.path(*one) for one in asked}) == len(asked)
        assert cache.path(replace(judge, price=(1, 1), key_env="X"), "p", "t") == cache.path(*asked[0])

    def test_what_was_kept_is_read_back_and_damage_is_as_nothing(self, tmp_path):
        cache, judge, answer = Cache(tmp_path), judge_at("http://a"), Answer("été\n", False, 1, 2)
        path = cache.path(judge, "p", "t")
        assert cache.read(path) is None
        cache.keep(path, judge, answer)
        assert cache.read(path) == answer
        path.write_text(path.read_text()[:-20])
        assert cache.read(path) is None
        cache.keep(path, judge, "HTTP 500")
        assert cache.read(path) == "HTTP 500"


def test_texts_are_strings_or_objects_with_a_text(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "one", "n": 1}\n\n"two"\n' + json.dumps({"text": "three\n"}) + "\n")
    (texts,) = read_texts(path).sets
    assert (texts.arm, texts.texts) == ("some", ["one", "two", "three\n"])
    assert read_texts(path, 2).texts == ["one", "two"]
