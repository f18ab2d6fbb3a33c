"""storyworld: a corpus of short stories this project writes itself, with a hidden plot and an exact law.

`storyworld("mini")` generates stories, scores any text exactly, gives the exact p(x_i | x_U) of any mask and says which
constraints a text breaks. The grammars are frozen: see VERSION and `Storyworld.fingerprint`.
"""

from rmdm.data.storyworld.checker import Check
from rmdm.data.storyworld.world import SIZES, VERSION, Storyworld, storyworld

__all__ = ["SIZES", "VERSION", "Check", "Storyworld", "storyworld"]
