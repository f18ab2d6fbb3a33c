"""Second names for files, folders that exchange theirs, and a folder's own name."""

import errno
import os
from pathlib import Path

import pytest

from rmdm import links
from rmdm.errors import ConfigError


def two_folders(place: Path) -> tuple[Path, Path]:
    for name in ("new", "old"):
        (place / name).mkdir()
        (place / name / "content").write_text(name)
    return place / "new", place / "old"


@pytest.mark.parametrize("at_once", [True, False])
def test_folders_exchange_their_names(at_once, tmp_path, monkeypatch):
    if not at_once:
        monkeypatch.setattr(links, "exchange_at_once", lambda one, other: False)
    new, old = two_folders(tmp_path)
    links.exchange(new, old)
    assert [(folder / "content").read_text() for folder in (new, old)] == ["old", "new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_an_exchange_that_cannot_be_is_an_error_and_changes_nothing(tmp_path):
    new, old = two_folders(tmp_path)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        links.exchange(new, tmp_path / "none")
    assert [(folder / "content").read_text() for folder in (new, old)] == ["new", "old"]


@pytest.mark.parametrize("can_link", [True, False])
def test_a_file_gets_a_second_name_or_a_copy(can_link, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, "no links here")

    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "one").write_text("content")
    links.link_or_copy(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "content"
    assert (tmp_path / "one").samefile(tmp_path / "two") == can_link


def test_a_folder_has_one_name_of_its_own(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert links.own_name(tmp_path / "link" / "new") == links.own_name(tmp_path / "folder" / ".." / "folder" / "new")
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(ConfigError, match=r"other is a link that leads back to itself; name another folder"):
        links.own_name(tmp_path / "other")
