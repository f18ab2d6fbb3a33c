import numpy as np
import pytest

from rmdm.errors import ConfigError
from rmdm.training.steps import Plan, Prefetcher, Step


@pytest.mark.parametrize(
    ("batch", "size", "micro", "section", "message"),
    [
        (16, 3, None, "", r"^train.batch=16 does not divide over 3 ranks"),
        (16, 2, 3, "", r"^train.micro_batch=3 does not divide"),
        (16, 3, None, "meanflow.", r"^meanflow.train.batch=16 does not divide"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_by_its_field(batch, size, micro, section, message):
    with pytest.raises(ConfigError, match=message):
        Plan.make(0, batch, 0, size, micro, section=section)


@pytest.mark.parametrize(
    ("batch", "size", "micro", "most", "found"),
    [
        (1024, 1, None, 64, 64),
        (1024, 2, None, 100, 64),
        (48, 1, None, 64, 48),  # a share that fits is taken whole
        (1024, 1, 512, 64, 512),  # what is asked for is
        (127, 1, None, 64, 127),  # row by row would take far too long
        (1024, 1, None, None, 1024),
    ],
)
def test_a_share_that_is_too_large_for_a_cpu_is_taken_in_parts(batch, size, micro, most, found):
    plan = Plan.make(0, batch, 0, size, micro, most=most)
    assert plan.micro_batch == found
    assert sorted(np.concatenate(plan.places())) == list(range(0, batch, size))


def test_the_prefetcher_yields_every_step_in_order_and_passes_errors_on():
    with Prefetcher(4, 9, lambda step: Step(step, [], 1), pin=False) as steps:
        assert [item.step for item in steps] == [4, 5, 6, 7, 8]

    def broken(step):
        if step == 1:
            raise RuntimeError("no batch today")
        return Step(step, [], 1)

    with Prefetcher(0, 2, broken, pin=False) as steps:
        items = iter(steps)
        assert next(items).step == 0
        with pytest.raises(RuntimeError, match="no batch today"):
            next(items)


def test_leaving_early_ends_the_thread():
    with Prefetcher(0, 10**6, lambda step: Step(step, [], 1), pin=False) as steps:
        next(iter(steps))
    assert not steps.thread.is_alive()
