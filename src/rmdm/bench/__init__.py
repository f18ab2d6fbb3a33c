"""The kinds of `rmdm bench`."""

from rmdm.bench import verb_sample, verb_train
from rmdm.kinds import Kind

KINDS = {
    "train": Kind(verb_train.HELP, verb_train.flags, verb_train.run),
    "sample": Kind(verb_sample.HELP, verb_sample.flags, verb_sample.run),
}
