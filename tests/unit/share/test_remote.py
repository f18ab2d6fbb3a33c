"""Models on the hub, against a real server on this machine: fetched, pushed, and all that can go wrong."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

import rmdm
from rmdm.errors import CheckpointError, ConfigError, RMDMError
from rmdm.hub import find_model
from rmdm.share import remote
from rmdm.share.export import export
from rmdm.share.manifest import MANIFEST, PARTS, verify
from rmdm.share.remote import fetch, push
from tests.hub_server import UPLOADS, Hub, at_hub, log_in
from tests.release import save_release

NAME = "alice/tiny"
pytestmark = UPLOADS


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with at_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("releases")
    for kind in ("rmdm", "mdlm"):
        export(str(save_release(root / f"{kind}-own", kind)), root / kind, lambda _: None, licence="mit")
    return {kind: root / kind for kind in ("rmdm", "mdlm")}


def texts(ref: Path | str, **where: str) -> list[str]:
    return rmdm.load(ref, "cpu", **where).generate(2, 3, seed=4).texts


def refusal(ref: str = NAME, revision: str | None = None) -> str:
    with pytest.raises(RMDMError) as caught:
        fetch(ref, revision)
    message = str(caught.value)
    assert "\n" not in message
    return message


def downloads(hub: Hub) -> list[str]:
    """Files that were asked for since the last look."""
    found = [asked.split("/", 5)[5] for asked in hub.asked if asked.startswith("GET") and "/resolve/" in asked]
    hub.asked.clear()
    return found


@pytest.mark.parametrize("large", [".safetensors", ".none"])
def test_there_and_back_again(hub, releases, large):
    hub.large = large
    done = push(releases["rmdm"], NAME, "first")
    assert done.url == f"{hub.url}/{NAME}"
    assert hub.repos[NAME].branches["main"] == done.commit
    assert hub.repos[NAME].messages[-1] == "first"
    assert set(hub.files(NAME)) == {*PARTS, MANIFEST, ".gitattributes"}
    assert texts(NAME) == texts(releases["rmdm"])


def test_only_parts_of_a_model_are_downloaded_and_each_once(hub, releases):
    push(releases["mdlm"], NAME, "first")
    hub.change(NAME, model_py=b"import os", pytorch_model_bin=b"pickle", config_json=b"{}", flow__code_py=b"")
    fetch(NAME)
    assert set(downloads(hub)) == {*verify(releases["mdlm"]), MANIFEST}
    folder = fetch(NAME)
    assert downloads(hub) == []
    assert not (folder / "model.py").exists()


def test_a_new_release_replaces_the_old_one_whole(hub, releases):
    push(releases["rmdm"], NAME, "first")
    assert texts(NAME) == texts(releases["rmdm"])
    push(releases["mdlm"], NAME, "second")
    assert "flow/flow.json" not in hub.files(NAME)
    assert texts(NAME) == texts(releases["mdlm"])


def test_branches_and_commits_are_revisions(hub, releases):
    first = push(releases["rmdm"], NAME, "first")
    push(releases["mdlm"], NAME, "other", revision="small")
    assert texts(NAME, revision="small") == texts(releases["mdlm"])
    assert texts(NAME) == texts(NAME, revision=first.commit) == texts(releases["rmdm"])
    push(releases["rmdm"], NAME, "again", revision="small")
    assert texts(NAME, revision="small") == texts(releases["rmdm"])
    assert (
        refusal(revision="large") == f"{NAME} has no revision 'large'; use a branch, tag or commit of it, such as main"
    )


def test_a_private_model_is_for_its_owner(hub, releases, monkeypatch):
    push(releases["mdlm"], NAME, "first", private=True)
    assert hub.repos[NAME].private
    log_in(monkeypatch, "hf_bob")
    assert refusal().startswith(f"{NAME} is neither a folder here nor a model on the hub that you may see (404); check")
    log_in(monkeypatch, None)
    assert refusal().endswith("or log in with 'hf auth login', or set HF_TOKEN if it is private")
    log_in(monkeypatch, "hf_alice")
    assert fetch(NAME).is_dir()


def test_pushing_needs_a_token_that_may(hub, releases, monkeypatch):
    for token, name, rule in (
        (None, NAME, f"no Hugging Face token is set, and {NAME} cannot be written without; log in with"),
        ("hf_nobody", NAME, f"the hub does not know your token (401), so {NAME} cannot be written; log in with"),
        ("hf_bob", NAME, f"your token may not write to {NAME} (403); use one that alice lets write, or another name"),
    ):
        log_in(monkeypatch, token)
        with pytest.raises(ConfigError) as caught:
            push(releases["mdlm"], name, "first")
        assert str(caught.value).startswith(rule)
    assert not hub.repos


def test_a_repo_of_something_else_is_not_filled(hub, releases):
    push(releases["mdlm"], NAME, "first")
    hub.repos[NAME].commit("main", {"config.json": b"{}", "README.md": b""}, "something else")
    with pytest.raises(ConfigError, match=f"^{NAME} is taken: it holds config.json, and no model of rmdm; choose"):
        push(releases["mdlm"], NAME, "second")
    assert refusal() == f"{NAME} on the hub is no model of rmdm: it has no model.json; check the name"


@pytest.mark.parametrize(
    ("status", "rule"),
    [
        (401, "is neither a folder here nor a model on the hub that you may see (401)"),
        (403, f"your token may not read {NAME} (403); use one that alice lets read, or another name"),
        (404, "is neither a folder here nor a model on the hub that you may see (404)"),
        (429, "the hub takes no more requests from you for now (429); try again in some minutes"),
        (500, f"the hub is out of order (500), so {NAME} could not be fetched; try again later"),
        (503, f"the hub is out of order (503), so {NAME} could not be fetched; try again later"),
    ],
)
def test_a_hub_that_refuses_to_tell(hub, releases, status, rule):
    push(releases["mdlm"], NAME, "first")
    hub.broken["GET /api/models"] = status
    assert rule in refusal()


@pytest.mark.parametrize(
    ("where", "status", "rule"),
    [
        ("repos/create", 500, f"the hub is out of order (500), so {NAME} could not be pushed; try again later"),
        ("repos/create", 403, f"your token may not write to {NAME} (403)"),
        ("commit/main", 500, f"the hub is out of order (500), so {NAME} could not be pushed; try again later"),
        ("commit/main", 403, f"your token may not write to {NAME} (403)"),
        ("commit/main", 404, f"{NAME} is not on the hub, or your token may not see it (404)"),
        ("validate-yaml", 400, f"the hub refused {NAME} (Invalid metadata in README.md"),
    ],
)
def test_a_hub_that_refuses_to_take(hub, releases, where, status, rule):
    hub.broken[where] = status
    with pytest.raises(ConfigError) as caught:
        push(releases["mdlm"], NAME, "first")
    assert str(caught.value).startswith(rule)
    assert "\n" not in str(caught.value)
    assert NAME not in hub.repos or "model.json" not in hub.files(NAME)


def test_a_download_that_breaks_off_goes_on(hub, releases):
    push(releases["mdlm"], NAME, "first")
    hub.broken[r"GET .*/resolve/.*model\.safetensors"] = "cut"
    assert texts(NAME) == texts(releases["mdlm"])
    asked = [line for line in hub.asked if line.startswith("GET") and line.endswith("model.safetensors")]
    assert len(asked) == 2


def test_half_a_file_is_no_file(hub, releases):
    push(releases["mdlm"], NAME, "first")
    hub.broken[r"GET .*/resolve/.*model\.safetensors"] = "short"
    message = refusal()
    assert message.startswith(f"a file of {NAME} came in part (Consistency check failed: file should be of size")
    assert "model.safetensors" in message
    hub.broken.clear()
    assert texts(NAME) == texts(releases["mdlm"])


def test_what_is_wrong_on_the_hub_is_refused_by_its_name(hub, releases):
    push(releases["mdlm"], NAME, "first")
    data = hub.files(NAME)["model.safetensors"]
    for wrong, rule in (
        (data[:-1] + b"\0", "was changed after the release"),
        (data[:-1], f"has {len(data) - 1:,} bytes"),
        (None, "is missing"),
    ):
        hub.change(NAME, model_safetensors=wrong)
        message = refusal()
        assert f"model.safetensors {rule}" in message
        assert message.endswith(f"so it is on the hub too, tell the owner of {NAME}")


def test_a_page_that_was_edited_on_the_hub_does_no_harm(hub, releases):
    push(releases["mdlm"], NAME, "first")
    hub.change(NAME, README_md=b"# Mine\n")
    assert texts(NAME) == texts(releases["mdlm"])


def test_a_file_that_broke_in_the_cache_is_downloaded_again(hub, releases):
    push(releases["mdlm"], NAME, "first")
    folder = fetch(NAME)
    blob = (folder / "model.safetensors").resolve()
    assert not blob.is_relative_to(folder)  # a link into the cache, which is no link out of it
    blob.write_bytes(blob.read_bytes()[:-1] + b"\0")
    assert texts(NAME) == texts(releases["mdlm"])


def test_without_a_network_the_cache_serves(hub, releases, monkeypatch):
    push(releases["mdlm"], NAME, "first")
    expected = texts(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert texts(NAME) == expected
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert texts(NAME) == expected
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert texts(NAME) == expected
    assert hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.broken["GET /api/models"] = 500
    assert texts(NAME) == expected


@pytest.mark.parametrize(
    ("endpoint", "why"), [("http://127.0.0.1:9", "127.0.0.1:9 does not answer"), ("http://hub.invalid", "no network")]
)
def test_a_slip_of_the_pen_names_both_readings_without_a_network(hub, monkeypatch, tmp_path, endpoint, why):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    head = f"runs/frist is neither a folder here nor in the Hugging Face cache, and the hub cannot be asked ({why}); "
    assert refusal("runs/frist") == head + "check the path, or try again with a network"
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert refusal("runs/frist") == head + "did you mean 'runs/first'?"
    with pytest.raises(ConfigError, match="cannot be pushed: the hub cannot be reached"):
        remote.check_can_push(NAME)


def test_a_slip_of_the_pen_names_both_readings_with_a_network(hub, tmp_path):
    head = "runs/frist is neither a folder here nor a model on the hub that you may see (404); "
    assert (
        refusal("runs/frist")
        == head + "check the name, or log in with 'hf auth login', or set HF_TOKEN if it is private"
    )
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert refusal("runs/frist") == head + "did you mean 'runs/first'?"


def test_a_folder_of_that_name_wins(hub, releases, tmp_path):
    push(releases["mdlm"], NAME, "first")
    shutil.copytree(releases["rmdm"], tmp_path / NAME)
    hub.asked.clear()
    assert texts(NAME) == texts(releases["rmdm"])
    assert hub.asked == []
    with pytest.raises(ConfigError, match=f"revision='main' is of the hub, and {NAME} is a path"):
        rmdm.load(NAME, "cpu", revision="main")


def test_figures_of_a_hub_s_model_lie_here_and_do_not_hide_it(hub, releases, tmp_path):
    push(releases["mdlm"], NAME, "first")
    (tmp_path / NAME / "eval").mkdir(parents=True)
    assert find_model(Path(NAME)) == fetch(NAME)


def test_a_release_without_a_manifest_is_a_model_still(hub, releases):
    push(releases["mdlm"], NAME, "first")
    own = {path: data for path, data in hub.files(NAME).items() if path in PARTS}
    own["model.json"] = own["model.json"].replace(b'"released"', b'"was"')
    hub.repos[NAME].commit("main", own, "by hand")
    assert texts(NAME) == texts(releases["mdlm"])


def test_names_that_no_hub_has(hub):
    with pytest.raises(CheckpointError, match="does not exist; give a run directory"):
        find_model("a/b/c")
    assert hub.asked == []
