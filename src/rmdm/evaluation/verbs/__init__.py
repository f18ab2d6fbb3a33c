"""The kinds of `rmdm eval`."""

from rmdm.evaluation.verbs import gap, gen, judge, ppl, stories
from rmdm.kinds import Kind

KINDS = {
    "gap": Kind(gap.HELP, gap.flags, gap.run),
    "gen": Kind(gen.HELP, gen.flags, gen.run),
    "judge": Kind(judge.HELP, judge.flags, judge.run),
    "ppl": Kind(ppl.HELP, ppl.flags, ppl.run),
    "stories": Kind(stories.HELP, stories.flags, stories.run),
}
