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
