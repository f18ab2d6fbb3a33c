"""The kinds of `rmdm bench`."""

from rmdm.bench import verb_data, verb_encode, verb_meanflow, verb_sample, verb_train
from rmdm.kinds import Kind

KINDS = {
    "train": Kind(verb_train.HELP, verb_train.flags, verb_train.run),
    "sample": Kind(verb_sample.HELP, verb_sample.flags, verb_sample.run),
    "meanflow": Kind(verb_meanflow.HELP, verb_meanflow.flags, verb_meanflow.run),
    "encode": Kind(verb_encode.HELP, verb_encode.flags, verb_encode.run),
    "data": Kind(verb_data.HELP, verb_data.flags, verb_data.run),
}
