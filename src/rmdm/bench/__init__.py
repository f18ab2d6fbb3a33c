"""The kinds of `rmdm bench`."""

from rmdm.bench import verb_sample
from rmdm.kinds import Kind

KINDS = {
    "sample": Kind(verb_sample.HELP, verb_sample.flags, verb_sample.run),
}
