import dataclasses
import inspect
import re

import rmdm.config
from rmdm.cli import config_flags
from rmdm.config import Config, DataConfig, field_names


def test_every_field_has_a_docstring_for_the_help_page():
    assert set(config_flags().values()) == set(field_names(Config))
    documented = re.findall(r"^    (\w+): [^\n]*\n    \"\"\"", inspect.getsource(rmdm.config), flags=re.MULTILINE)
    leaves = {name.rpartition(".")[2] for name in field_names(Config)}
    assert leaves <= set(documented)


def test_text_of_ones_own_wins_over_stories():
    stories = DataConfig(storyworld="mini")
    assert stories.world == "mini"
    assert dataclasses.replace(stories, path="a.txt").world is None
    assert dataclasses.replace(stories, dataset="lm1b").world is None
    assert DataConfig(path="a.txt").world is None
