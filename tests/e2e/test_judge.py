"""`rmdm eval judge` as people run it, against a real server that misbehaves."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rmdm.cli import main
from tests import warm
from tests.judge_server import CRITERIA, always, good, judge_server, scores_of
from tests.release import LENGTH, save_release

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def texts_file(n: int, name: str = "texts.jsonl") -> str:
    Path(name).write_text("".join(json.dumps({"text": f"text {k}"}) + "\n" for k in range(n)))
    return name


def command(*args: str) -> list[str]:
    return ["eval", "judge", "--backoff", "0.01", "--retries", "3", *args, "--json"]


def judged(capfd, *args: str) -> tuple[dict, str]:
    """Run, expect success; the outcome, and what people read."""
    code = main(command(*args))
    captured = capfd.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out), captured.err


def misbehaving(text: str, attempt: int) -> str:
    """One fault of every kind: some pass, some stay."""
    passing = {
        1: ["429"], 2: ["429+1"], 3: ["500", "503"], 4: ["hang"], 5: ["drip"], 6: ["close"], 7: ["half", "no JSON"],
        8: ["no choices", "500", "429"], 9: ["429@1"],
    }  # fmt: skip
    lasting = {
        20: "500", 21: "429", 22: "hang", 23: "close", 24: "400", 25: "no JSON",
        30: "{", 31: "I'd give it a 7.", 32: '{"overall":3}', 33: "cut", 34: "out of range", 35: "[]",
    }  # fmt: skip
    number = int(text.split()[1])
    if number in lasting:
        return lasting[number]
    faults = passing.get(number, [])
    return faults[attempt] if attempt < len(faults) else "ok"


def test_survives_its_misbehaving_server(capfd):
    args = ["--texts", texts_file(64), "--timeout", "0.5", "--retries", "5", "--price", "1,2"]
    args += ["--scores", "scores.jsonl"]
    with judge_server(misbehaving) as server, judge_server() as other:
        args += ["--judge", f"bad@{server.url}", "--judge", f"good@{other.url}"]
        outcome, said = judged(capfd, *args)
        calls = len(server.calls) + len(other.calls)
        again, said_again = judged(capfd, *args)
        assert len(server.calls) + len(other.calls) == calls
    assert set(server.count()) == {f"text {k}" for k in range(64)}
    assert outcome["calls"] == {"bad": 64, "good": 64}
    assert again["calls"] == {"bad": 0, "good": 0}
    bad, well = outcome["judge"]
    counts = ("n", "judged", "malformed", "out_of_range", "failed")
    assert [bad[name] for name in counts] == [64, 52, 5, 1, 6]
    assert [well[name] for name in counts] == [64, 64, 0, 0, 0]
    scored = [scores_of(f"text {k}", "bad") for k in range(64) if not 20 <= k <= 25 and not 30 <= k <= 35]
    for name in CRITERIA:
        assert bad[name] == pytest.approx(sum(scores[name] for scores in scored) / 52)
        assert 0 < bad[f"{name}_half"] < 1
    assert outcome["agreement"][0]["n"] == 52
    without_dates = [[{**row, "date": ""} for row in found["judge"]] for found in (outcome, again)]
    assert without_dates[0] == without_dates[1]

    lines = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    assert [(line["text"], line["judge"]) for line in lines] == [
        (f"text {k}", judge) for k in range(64) for judge in ("bad", "good")
    ]
    assert all("overall" in line or (line["fault"] and line["reason"]) for line in lines)

    # The count and the cost come before the first answer; in the second run there is nothing to count.
    first, *_ = said.splitlines()
    assert first.startswith("judge: bad: 64 calls for 64 texts, about ")
    assert "cost 0." in first
    assert said_again.startswith("judge: bad: no call, all 64 texts were asked about before\n")
    assert "12 verdicts have no scores; --retry-failed asks for them again" in said
    everything = said + said_again + Path("scores.jsonl").read_text() + json.dumps(outcome)
    assert KEY not in everything
    assert not any(KEY in path.read_text() for path in Path("data/judge").rglob("*.json"))


def test_the_count_is_printed_before_any_call(capfd):
    seen = []

    def behave(text: str, attempt: int) -> str:
        if not seen:
            seen.append(capfd.readouterr().err)
        return "ok"

    with judge_server(behave) as server:
        judged(capfd, "--texts", texts_file(51), "--judge", f"fake@{server.url}")
    assert "51 calls for 51 texts, about " in seen[0]


def test_a_run_is_sampled_once_and_its_rows_are_kept_beside_it(tmp_path, capfd, monkeypatch):
    run = save_release(tmp_path / "rmdm", "rmdm")
    args = [str(run), "--n", "6", "--steps", "2,3", "--seed", "1", "--device", "cpu"]
    with judge_server() as server:
        args += ["--judge", f"a@{server.url}", "--judge", f"b@{server.url}"]
        outcome, said = judged(capfd, *args)
        calls = len(server.calls)
        monkeypatch.delenv("OPENAI_API_KEY")
        _, said_again = judged(capfd, *args)
        assert len(server.calls) == calls <= 24
    assert "tiny-rmdm writes 6 texts in 2 steps" in said
    assert "writes" not in said_again
    saved = json.loads((run / "eval" / "judge.json").read_text())["rows"]
    rows = [row for row in saved if row["row"] == "scores"]
    assert [(row["arm"], row["steps"], row["judge"]) for row in rows] == [
        ("tiny-rmdm", steps, judge) for steps in (2, 3) for judge in "ab"
    ]
    assert [row["n"] for row in rows] == [6] * 4
    assert rows[0].keys() >= {
        "sampler",
        "temperature",
        "seed",
        "tau",
        "precision",
        "device",
        "date",
        "prompt",
        "overall",
    }
    assert rows[0]["precision"] == "fp32 network, float64 draws"
    assert [row["row"] for row in saved[4:]] == ["agreement"]
    assert len(outcome["judge"]) == 4

    import rmdm

    texts = rmdm.load(run, "cpu").generate(6, 2, 1).texts + rmdm.load(run, "cpu").generate(6, 3, 1).texts
    assert {call.text for call in server.calls} == set(texts)


def test_an_autoregressive_run_has_one_row_and_a_file_stands_beside_it(tmp_path, capfd):
    run = save_release(tmp_path / "ar", "ar")
    with judge_server() as server:
        judge = ["--judge", f"a@{server.url}", "--judge", f"b@{server.url}"]
        outcome, said = judged(capfd, str(run), "--texts", texts_file(5), "--n", "4", "--steps", "2,3", *judge)
    assert [(row["arm"], row["steps"], row["n"]) for row in outcome["judge"][::2]] == [
        ("tiny-ar", LENGTH, 4),
        ("texts", None, 4),
    ]
    assert [row["arm"] for row in outcome["agreement"]] == ["tiny-ar", "texts", "all"]
    assert "agreement on all, a and b: Spearman" in said


def test_other_weights_are_sampled_anew(tmp_path, capfd):
    run = save_release(tmp_path / "run", "mdlm")
    with judge_server() as server:
        args = [str(run), "--n", "2", "--judge", f"fake@{server.url}"]
        judged(capfd, *args)
        weights = run / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1000:] = bytes(1000)
        weights.write_bytes(content)
        assert "writes 2 texts" in judged(capfd, *args)[1]


def test_figures_of_other_settings_are_put_away(tmp_path, capfd):
    run = save_release(tmp_path / "mdlm", "mdlm")
    with judge_server() as server:
        args = [str(run), "--n", "4", "--device", "cpu", "--judge", f"a@{server.url}"]
        judged(capfd, *args, "--steps", "2")
        before = (run / "eval" / "judge.json").read_text()
        judged(capfd, *args, "--steps", "2")
        assert not list((run / "eval").glob("earlier/judge-2*")), "the same is no other setting"
        judged(capfd, *args, "--steps", "3")
    (kept,) = (run / "eval").glob("earlier/judge-2*")
    assert kept.read_text() == before


def test_another_prompt_is_another_question(capfd):
    Path("mine.txt").write_text('Rate as {"fluency":N,...}:\n<<<TEXT\n{text}\nTEXT>>>\n')
    with judge_server() as server:
        args = ["--texts", texts_file(2), "--judge", f"fake@{server.url}"]
        judged(capfd, *args)
        outcome, _ = judged(capfd, *args, "--prompt", "mine.txt")
        assert outcome["calls"] == {"fake": 2}
        asked = server.calls[-1].body["messages"][0]["content"]
    assert asked.startswith('Rate as {"fluency":N,...}:\n<<<TEXT\ntext ')


def test_one_dead_judge_does_not_spoil_the_other(capfd):
    with judge_server() as gone:
        pass
    with judge_server() as server:
        judges = ["--judge", f"gone@{gone.url}", "--judge", f"here@{server.url}"]
        outcome, _ = judged(capfd, "--texts", texts_file(4), *judges)
    assert [(row["judge"], row["judged"], row["failed"]) for row in outcome["judge"]] == [
        ("gone", 0, 4),
        ("here", 4, 0),
    ]


@pytest.mark.parametrize("fault", ["401", "500", "close"])
def test_when_all_calls_fail_the_exit_code_says_so_and_the_next_run_asks_again(capfd, fault):
    with judge_server(always(fault)) as server:
        args = ["--texts", texts_file(5), "--judge", f"fake@{server.url}"]
        assert main(command(*args)) == 2
        captured = capfd.readouterr()
        outcome = json.loads(captured.out)
        assert outcome["ok"] is False
        assert server.url in outcome["error"]
        assert captured.err.splitlines()[-1] == f"rmdm: {outcome['error']}"
        assert KEY not in captured.err + captured.out
        server.behave = good
        assert judged(capfd, *args)[0]["judge"][0]["judged"] == 5


def test_killed_at_any_time_it_goes_on_where_it_stopped(capfd):
    n, concurrency = 40, 3
    with judge_server(always("slow")) as server:
        args = ["--texts", texts_file(n), "--judge", f"fake@{server.url}", "--concurrency", str(concurrency)]
        process = warm.Process(warm.CLI, *command(*args), env=dict(os.environ))
        while len(server.calls) < 15:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        asked = server.count()
        outcome, _ = judged(capfd, *args)
        twice = [text for text, count in server.count().items() if count > 1]
    assert outcome["judge"][0]["judged"] == n
    assert 15 <= len(asked) < n
    assert len(twice) <= concurrency
    assert max(server.count().values()) <= 2


def test_ctrl_c_does_not_wait_for_calls_under_way(capfd):
    with judge_server(lambda text, attempt: "ok" if text == "text 0" else "hang") as server:
        args = ["--texts", texts_file(9), "--judge", f"fake@{server.url}", "--concurrency", "4"]
        process = warm.Process(warm.CLI, *command(*args), env=dict(os.environ))
        while server.under_way < 4:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert process.returncode == 130
        assert error.endswith("interrupted; the same command goes on where this one stopped\n")
        assert server.under_way == 4
        server.behave = good
        judged(capfd, *args)
    assert server.count()["text 0"] == 1


def test_two_at_once_do_no_harm(capfd):
    with judge_server(always("slow")) as server:
        args = command("--texts", texts_file(20), "--judge", f"fake@{server.url}")
        both = [warm.Process(warm.CLI, *args, env=dict(os.environ)) for _ in range(2)]
        found = [json.loads(process.communicate()[0])["judge"][0] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert [row["judged"] for row in found] == [20, 20]
        assert found[0]["overall"] == found[1]["overall"]
        assert max(server.count().values()) <= 2
        assert judged(capfd, *args[2:-1])[0]["calls"] == {"fake": 0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no texts to judge; give a run directory or --texts FILE.jsonl"),
        (["--texts", "nowhere.jsonl"], "--texts nowhere.jsonl does not exist"),
        (["--texts", "empty.jsonl"], "--texts empty.jsonl holds no text"),
        (["--texts", "bad.jsonl"], "bad.jsonl, line 2 holds no text"),
        (["--texts", "latin.jsonl"], "--texts latin.jsonl is not UTF-8"),
        (["nowhere"], "nowhere does not exist"),
        (["--texts", "t.jsonl"], "judge deepseek-v4-flash needs a key, and DEEPSEEK_API_KEY is not set"),
        (["--texts", "t.jsonl", "--key-env", "MY_KEY"], "judge deepseek-v4-flash needs a key, and MY_KEY is not set"),
        (["--texts", "t.jsonl", "--judge", "gpt"], "judge 'gpt' is no preset"),
        (
            ["--texts", "t.jsonl", "--judge", "m@http://127.0.0.1:9"],
            "http://127.0.0.1:9/chat/completions cannot be reach",
        ),
        (["--texts", "t.jsonl", "--prompt", "t.jsonl"], "--prompt t.jsonl holds {text} 0 times"),
        (["--texts", "t.jsonl", "--n", "0"], "--n 0 is below 1"),
        (["--texts", "t.jsonl", "--steps", "0"], "--steps 0 holds a number below 1"),
        (["--texts", "t.jsonl", "--concurrency", "0"], "--concurrency 0 is below 1"),
        (["--texts", "t.jsonl", "--timeout", "nan"], "--timeout nan is no positive number"),
        (["--texts", "t.jsonl", "--scores", "no/where.jsonl"], "--scores no/where.jsonl: no such folder"),
    ],
)
def test_mistakes_are_one_line(args, message, capfd, monkeypatch):
    monkeypatch.delenv("DEEPSEEK_API_KEY", raising=False)
    texts_file(2, "t.jsonl")
    Path("empty.jsonl").write_text("\n")
    Path("bad.jsonl").write_text('{"text": "a"}\n{"story": "b"}\n')
    Path("latin.jsonl").write_bytes(b'"caf\xe9"\n')
    assert main(["eval", "judge", *args, "--backoff", "0.01"]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"rmdm: {message}")
    assert error.count("\n") == 1


def test_a_missing_run_is_noticed_before_another_writes(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_API_KEY", KEY)
    run = save_release(tmp_path / "run", "mdlm")
    assert main(["eval", "judge", str(run), "nowhere", "--n", "2"]) == 2
    captured = capfd.readouterr()
    assert "nowhere does not exist" in captured.err
    assert "writes" not in captured.out


def test_a_missing_key_is_noticed_before_anything_is_written(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("DEEPSEEK_API_KEY", raising=False)
    run = save_release(tmp_path / "run", "mdlm")
    assert main(["eval", "judge", str(run)]) == 2
    captured = capfd.readouterr()
    assert "DEEPSEEK_API_KEY is not set" in captured.err
    assert "writes" not in captured.out
