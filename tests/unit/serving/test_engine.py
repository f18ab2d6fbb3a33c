"""Many requests share the runs of a network, and none of them can tell."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rmdm.errors import ConfigError, DataError, RMDMError
from rmdm.hub import load_model
from rmdm.model import Model
from rmdm.request import Generation, Request
from rmdm.samplers.denoiser import hidden_together
from rmdm.serving.engine import Engine, Event, Fitting, Full, Group, Job, draw_together
from tests.release import save_release

REQUESTS: dict[str, list[dict[str, Any]]] = {
    "mdlm": [
        {"n": 3, "seed": 1, "steps": 4},
        {"n": 1, "seed": 2, "steps": 9},
        {"n": 2, "seed": 1, "steps": 4, "sampler": "balanced", "temperature": 0.7},
        {"n": 2, "seed": 5, "steps": 4, "sampler": "margin", "remask": 0.3},
        {"n": 1, "seed": 3, "steps": 4, "prefix": "anna was"},
        {"n": 2, "seed": 4, "steps": 3, "infill": "tom [MASK:2] near the [MASK] .", "top_p": 0.9},
        {"n": 1, "seed": 9, "steps": 4},
    ],
    "rmdm": [
        {"n": 3, "seed": 1, "steps": 4},
        {"n": 1, "seed": 2, "steps": 9, "guidance": 1.5},
        {"n": 2, "seed": 1, "steps": 4, "sampler": "balanced", "latent_seed": 8},
        {"n": 1, "seed": 3, "steps": 4, "prefix": "anna was", "draws": 3, "rounds": 3},
        {"n": 2, "seed": 3, "steps": 4, "prefix": "anna was", "given": "null"},
        {"n": 2, "seed": 4, "steps": 3, "infill": "tom [MASK:2] near the [MASK] .", "given": "prior"},
        {"n": 2, "seed": 4, "steps": 3, "like": "tom was sad near the river ."},
        {"n": 1, "seed": 9, "steps": 4, "latent_temperature": 0.5},
    ],
    "sedd": [{"n": 2, "seed": 1, "steps": 4}, {"n": 1, "seed": 2, "steps": 7}, {"seed": 3, "prefix": "anna was"}],
    "ar": [{"n": 2, "seed": 1}, {"n": 1, "seed": 2, "temperature": 0.5}, {"seed": 3, "prefix": "anna was"}],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("served")
    return {name: load_model(save_release(folder / name, name)) for name in REQUESTS}


class Client:
    """Hears what one job is told."""

    def __init__(self, model: Model, values: dict[str, Any], *, steps: bool = False) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.job = Job(model, model.ready(Request(**values)), self.hear, steps)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        if event.kind != "step":
            self.ended.set()

    def wait(self) -> Event:
        assert self.ended.wait(60)
        return self.events[-1]

    def done(self) -> Generation:
        event = self.wait()
        assert event.done is not None, event.error
        return event.done


@pytest.fixture
def engine():
    one = Engine(most_rows=16)
    yield one
    one.close()


@pytest.mark.parametrize("steps", [False, True], ids=["quiet", "heard"])
def test_requests_of_all_kinds_together_get_what_each_gets_alone(models, engine, steps):
    asked = [(models[name], values) for name, of in REQUESTS.items() for values in of]
    clients = [Client(model, values, steps=steps) for model, values in asked]
    engine.submit([client.job for client in clients])
    engine.start()
    for client, (model, values) in zip(clients, asked, strict=True):
        done, alone = client.done(), model.write(Request(**values))
        assert done.texts == alone.texts
        assert np.array_equal(done.tokens, alone.tokens)
        assert done.settings == alone.settings
    assert engine.counts.jobs == len(clients)
    assert engine.active_rows == 0


def test_waiting_requests_share_runs_of_the_network(models, engine):
    clients = [Client(models["mdlm"], {"seed": seed, "steps": 2 + seed % 3}) for seed in range(12)]
    engine.submit([client.job for client in clients])
    engine.start()
    for client in clients:
        client.done()
    assert engine.counts.rounds <= 4
    assert engine.counts.rows > 2 * engine.counts.rounds


def test_rows_at_work_stay_within_the_limit(models, engine):
    seen = []
    clients = [Client(models["mdlm"], {"seed": seed, "n": 7, "steps": 6}, steps=True) for seed in range(5)]
    for client in clients:
        heard = client.job.listener
        client.job.listener = lambda event, heard=heard: (seen.append(engine.active_rows), heard(event))
    engine.submit([client.job for client in clients])
    engine.start()
    for client in clients:
        client.done()
    assert 7 < max(seen) <= 16


def test_rows_that_are_given_up_beside_others_take_up_room_until_those_are_done(models, monkeypatch):
    engine, runs = Engine(most_rows=8), []

    def counted(asks: list[Any]) -> list[Any]:
        runs.append(sum(len(ask.x_RL) for _, ask in asks))
        return hidden_together(asks)

    monkeypatch.setattr("rmdm.serving.engine.hidden_together", counted)
    alike = {"steps": 16, "sampler": "max_prob"}
    leaving = [Client(models["mdlm"], {"n": 5, "seed": seed, **alike}, steps=True) for seed in range(4)]
    staying = [Client(models["mdlm"], {"n": 1, "seed": 9 + seed, **alike}, steps=True) for seed in range(4)]

    def come(number: int) -> None:
        engine.submit([leaving[number].job, staying[number].job])

    for number, client in enumerate(staying):

        def listener(event: Event, number: int = number, heard: Any = client.job.listener) -> None:
            heard(event)
            if len(staying[number].events) == 1:
                leaving[number].job.cancel()
                if number + 1 < len(staying):
                    come(number + 1)

        client.job.listener = listener
    engine.start()
    come(0)
    for client in staying:
        assert client.done().texts == models["mdlm"].write(client.job.ready.request).texts
    assert max(runs) <= 8
    assert engine.active_rows == 0
    engine.close()


def test_what_was_given_up_while_it_was_held_does_not_run_beside_what_took_its_place(models):
    engine = Engine(most_rows=4)
    old, new = (Client(models["rmdm"], {"n": 4, "seed": seed, "steps": 3}) for seed in range(2))
    engine._held = [old.job]
    old.job.cancel()
    engine.submit([new.job])
    engine._begin(engine._take())
    assert [job for group in engine._groups for job in group.jobs] == [new.job]
    assert engine.counts.cancelled == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mdlm", {"n": 2, "seed": 1, "steps": 5}),
        ("mdlm", {"n": 2, "seed": 5, "steps": 5, "sampler": "entropy", "remask": 0.4}),
        ("rmdm", {"n": 2, "seed": 5, "steps": 5, "guidance": 2.0}),
        ("sedd", {"n": 2, "seed": 5, "steps": 5}),
        ("ar", {"n": 2, "seed": 5}),
    ],
)
def test_the_steps_that_are_told_lead_to_the_text(models, engine, name, values):
    client = Client(models[name], values, steps=True)
    engine.submit([client.job])
    engine.start()
    done = client.done()
    x_BL = client.job.ready.x_BL.numpy().copy()
    changes = [event.change for event in client.events[:-1]]
    assert [change.step for change in changes] == list(range(len(changes)))
    for change in changes:
        x_BL[change.row_N, change.place_N] = change.token_N
        written = change.token_N != models[name].tokenizer.mask_id
        assert ((change.p_N[written] > 0) & (change.p_N[written] <= 1)).all()
    assert np.array_equal(x_BL, done.tokens)
    assert len(changes) == (16 if name == "ar" else 5)


def test_a_request_that_is_given_up_leaves_and_the_others_stay(models, engine):
    long = Client(models["mdlm"], {"n": 4, "seed": 1, "steps": 4000}, steps=True)
    short = Client(models["mdlm"], {"n": 4, "seed": 1, "steps": 4})
    begun = threading.Event()
    heard = long.job.listener

    def gives_up(event: Event) -> None:
        heard(event)
        long.job.cancel()
        begun.set()

    long.job.listener = gives_up
    engine.submit([long.job])
    engine.start()
    assert begun.wait(60)
    engine.submit([short.job])
    assert short.done().texts == models["mdlm"].write(short.job.ready.request).texts
    assert len(long.events) == 1
    assert engine.counts.cancelled == 1
    assert engine.active_rows == 0


def test_a_full_queue_refuses_and_says_when_to_come_back(models):
    engine = Engine(most_rows=1, most_waiting=3)
    jobs = [Client(models["mdlm"], {"seed": seed, "steps": 2}).job for seed in range(6)]
    engine.submit(jobs[:3])
    with pytest.raises(Full, match="3 requests are waiting and no more are taken; try again in 1 s"):
        engine.submit(jobs[3:5])
    assert engine.waiting == 3
    engine.submit(jobs[5:])
    engine.start()
    engine.close()


def test_requests_for_which_there_is_room_do_not_count_as_waiting(models):
    engine = Engine(most_rows=2, most_waiting=1)
    jobs = [Client(models["mdlm"], {"seed": seed, "steps": 2}).job for seed in range(5)]
    for job in jobs[:3]:  # two will be written at once, one waits
        engine.submit([job])
    with pytest.raises(Full):
        engine.submit([jobs[3]])
    assert engine._take() == jobs[:2]
    with pytest.raises(Full):  # they are at work, though nothing of them is written yet
        engine.submit([jobs[3]])
    jobs[0].cancel()
    engine.submit([jobs[3]])
    with pytest.raises(Full):
        engine.submit([jobs[4]])


def test_a_failing_model_fails_its_own_requests_only(models, tmp_path):
    broken = load_model(save_release(tmp_path / "broken", "mdlm"))
    with torch.no_grad():
        broken.backbone.embed.weight.fill_(torch.nan)
    engine = Engine()
    bad, good = Client(broken, {"seed": 1, "steps": 3}), Client(models["mdlm"], {"seed": 1, "steps": 3})
    engine.submit([bad.job, good.job])
    engine.start()
    assert isinstance(bad.wait().error, DataError)
    assert good.done().texts
    again = Client(models["mdlm"], {"seed": 1, "steps": 3})
    engine.submit([again.job])
    assert again.done().texts == good.done().texts
    assert engine.counts.failed == 1
    engine.close()


def test_those_who_wait_when_it_closes_are_told(models):
    engine = Engine()
    client = Client(models["mdlm"], {"seed": 1, "steps": 3})
    engine._is_closed = True
    engine.submit([client.job])
    engine.start()
    assert isinstance(client.wait().error, RMDMError)
    assert "shutting down" in str(client.wait().error)


def test_a_request_that_fails_does_not_take_those_beside_it_along(models, engine):
    good = [Client(models["rmdm"], {"n": 2, "seed": seed, "steps": 4 + seed}) for seed in range(4)]
    latent = torch.zeros(4, 6)
    bad = Client(models["rmdm"], {"seed": 1, "steps": 4, "latent": latent})
    latent.fill_(torch.nan)  # after it was checked
    engine.submit([good[0].job, bad.job, *(client.job for client in good[1:])])
    engine.start()
    assert isinstance(bad.wait().error, DataError)
    for client in good:
        assert client.done().texts == models["rmdm"].write(client.job.ready.request).texts
    assert engine.counts.failed == 1


@pytest.mark.parametrize("more", [{}, {"prefix": "anna was", "given": "resample", "draws": 2, "rounds": 2}])
def test_latents_that_a_temperature_makes_too_large_are_refused_alone(models, engine, more):
    """Given a request like any other, when one of the same kind has latents beyond all numbers, it is written alone."""
    good = Client(models["rmdm"], {"n": 2, "seed": 1, "steps": 4, **more})
    bad = Client(models["rmdm"], {"n": 2, "seed": 2, "steps": 4, "latent_temperature": 900, **more})
    engine.submit([good.job, bad.job])
    engine.start()
    assert good.done().texts == models["rmdm"].write(good.job.ready.request).texts
    error = bad.wait().error
    assert isinstance(error, ConfigError)
    assert str(error).startswith("latent_temperature=900 draws latents beyond 1000, or NaN; use a lower one")


def test_who_hears_that_a_draw_failed_is_not_written(models, engine, monkeypatch):
    """As on a GPU, which may tell of it only when it is waited for."""
    bad = Client(models["rmdm"], {"seed": 1, "steps": 4})

    def fails(latent: Any) -> None:
        raise DataError("the device failed")

    monkeypatch.setattr("rmdm.serving.engine.wait_for", fails)
    engine.submit([bad.job])
    engine.start()
    assert isinstance(bad.wait().error, DataError)
    good = Client(models["mdlm"], {"seed": 1, "steps": 4})  # draws nothing
    monkeypatch.undo()
    engine.submit([good.job])
    good.done()
    assert [event.kind for event in bad.events] == ["error"]
    assert (engine.counts.jobs, engine.counts.failed) == (1, 1)


def test_a_small_request_passes_a_large_one_for_which_there_is_no_room(models, engine):
    order: list[str] = []
    long = Client(models["mdlm"], {"n": 4, "seed": 1, "steps": 2000}, steps=True)
    large = Client(models["mdlm"], {"n": 16, "seed": 2, "steps": 2})
    small = Client(models["mdlm"], {"n": 1, "seed": 3, "steps": 2})
    for name, client in (("long", long), ("large", large), ("small", small)):
        heard = client.job.listener

        def listener(event: Event, name: str = name, heard: Any = heard) -> None:
            if event.kind == "done":
                order.append(name)
            heard(event)

        client.job.listener = listener
    engine.submit([long.job, large.job, small.job])
    engine.start()
    for client in (long, large, small):
        client.done()
    assert order == ["small", "long", "large"]


def test_a_large_request_is_not_passed_for_ever(models):
    engine = Engine(most_rows=8)
    large = Client(models["mdlm"], {"n": 8, "seed": 2, "steps": 2})
    begun = threading.Event()
    crowd = [Client(models["mdlm"], {"n": 1, "seed": seed, "steps": 3}) for seed in range(4)]
    more = iter(range(10, 400))

    def again(event: Event) -> None:
        if event.kind == "done" and not large.ended.is_set():
            one = Client(models["mdlm"], {"n": 1, "seed": next(more), "steps": 3})
            one.job.listener = again
            engine.submit([one.job])
        begun.set()

    for client in crowd:
        client.job.listener = again
    engine.submit([client.job for client in crowd])
    engine.start()
    assert begun.wait(60)
    engine.submit([large.job])
    assert large.done().texts
    assert large.job.passed <= 16 + 8
    engine.close()


def test_rows_that_were_given_up_are_not_counted(models):
    engine = Engine(most_rows=8)
    clients = [Client(models["mdlm"], {"n": 2, "seed": seed, "steps": 3}) for seed in range(4)]
    for client in clients[1:]:
        client.job.cancel()
    engine._held = [client.job for client in clients]
    assert engine.active_rows == 2


def test_rows_whose_latents_are_being_drawn_are_counted(models, monkeypatch):
    engine, seen = Engine(most_rows=8), []
    clients = [Client(models["rmdm"], {"n": 2, "seed": seed, "steps": 3}) for seed in range(3)]
    monkeypatch.setattr("rmdm.serving.engine.draw_together", lambda jobs: seen.append(engine.active_rows) or [])
    engine._held = [client.job for client in clients]  # since an earlier round
    engine._begin([])
    assert seen == [6, 6]  # before, for new jobs, of which there are none, and now
    assert engine._held == []


def test_how_long_to_hold_is_learnt_from_the_draw_alone(models, monkeypatch):
    now = 0.0

    def takes(seconds: float, act: Any) -> Any:
        def acting(*args: Any) -> Any:
            nonlocal now
            now += seconds
            return act(*args)

        return acting

    monkeypatch.setattr("rmdm.serving.engine.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("rmdm.serving.engine.draw_together", takes(3.0, draw_together))
    monkeypatch.setattr("rmdm.serving.engine.Group", takes(100.0, Group))
    monkeypatch.setattr("rmdm.serving.engine.Fitting", takes(1000.0, Fitting))
    engine = Engine(most_rows=16)
    after: dict[str, Any] = {"seed": 1, "steps": 3, "prefix": "anna was"}
    asked = [{"seed": 1, "steps": 3}, {**after, "given": "null"}, {**after, "draws": 3, "rounds": 3}]
    held, *others = [Client(models["rmdm"], values).job for values in asked]
    monkeypatch.setattr(engine, "_is_time", lambda now: True)
    engine._held = [held]
    engine._begin(others)
    assert (len(engine._groups), len(engine._fitting)) == (2, 1)
    assert engine._draw_seconds == 3.0
