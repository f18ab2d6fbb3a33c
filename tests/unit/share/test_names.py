"""Whether a name means a folder here or a model on the hub."""

import pytest

from rmdm.share.names import hub_name, is_hub_name, is_shipped


@pytest.mark.parametrize("ref", ["alice/tiny", "a/b", "Alice-1/my_model.v2", "runs/frist"])
def test_one_slash_and_no_such_path_is_a_name_on_the_hub(ref, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name(ref) == ref


@pytest.mark.parametrize(
    "ref",
    [
        "tiny", "./alice/tiny", "/alice/tiny", "~/tiny", "../tiny", "a/b/c", "alice/", "/tiny", "alice/tiny/", "",
        "alice/ti ny", "alice/tiny!", "-a/b", "a/.b", "a--b/c", "a/b..c", "a/b.git", "a/" + "b" * 100, "a/b\0", "ä/b",
    ],
)  # fmt: skip
def test_everything_else_is_none(ref, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name(ref) is None


def test_what_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "tiny").mkdir(parents=True)
    assert hub_name("alice/tiny") is None
    assert is_hub_name("alice/tiny")
    (tmp_path / "alice" / "file").write_text("")
    assert hub_name("alice/file") is None


def test_figures_measured_of_a_hub_s_model_do_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "tiny" / "eval").mkdir(parents=True)
    assert hub_name("alice/tiny") == "alice/tiny"
    (tmp_path / "alice" / "tiny" / "report").mkdir()
    assert hub_name("alice/tiny") == "alice/tiny"
    (tmp_path / "alice" / "tiny" / "eval").rmdir()
    assert hub_name("alice/tiny") == "alice/tiny"
    (tmp_path / "alice" / "tiny" / "config.yaml").write_text("")
    assert hub_name("alice/tiny") is None


def test_the_package_s_model_is_meant_by_no_name_and_by_its_own_unless_a_folder_has_that(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_shipped(None)
    assert is_shipped("shipped")
    assert not is_shipped("./shipped")
    assert not is_shipped("alice/shipped")
    (tmp_path / "shipped" / "eval").mkdir(parents=True)
    assert is_shipped("shipped")  # figures that were measured of it here
    (tmp_path / "shipped" / "model.json").write_text("")
    assert not is_shipped("shipped")
    assert is_shipped(None)
