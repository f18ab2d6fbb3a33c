"""Few-step draws learnt from trajectories, with a flow that is known exactly as the teacher."""

import numpy as np
import pytest
import torch

from rmdm.meanflow.distil import JUMPS, STATES, DistilObjective, JumpBatch, draw_jumps, jump_batch, trajectories
from rmdm.meanflow.paths import PATHS
from rmdm.meanflow.transport import follow
from rmdm.training.steps import Plan
from tests.reference.gaussian import Exact, Gaussian, fit, small_net

DATA = Gaussian.tilted(2, 2, 0.25, 3.0)
BATCH = 256


def noise(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, 2, 2, generator=torch.Generator().manual_seed(seed))


def exact_states(path: str, noise_BGD: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros(len(noise_BGD))
    times = [torch.full_like(zero, k / (STATES - 1)) for k in range(STATES)]
    return torch.stack([DATA.turn(PATHS[path], noise_BGD, zero, t) for t in times], dim=1)


@pytest.mark.parametrize("path", PATHS)
def test_trajectories_are_those_of_the_exact_flow(path):
    start = noise(256)
    found = trajectories(Exact(DATA, PATHS[path], velocity_only=True), start)
    exact = exact_states(path, start)
    assert found.shape == (256, STATES, 2, 2)
    assert torch.equal(found[:, 0], start)
    moved = (exact[:, -1] - start).norm()
    for state in range(1, STATES):
        assert 1e-6 < float((found[:, state] - exact[:, state]).norm() / moved) < 0.01


def test_intervals_are_the_steps_of_draws_in_1_2_and_4_evaluations():
    first, last = draw_jumps(3, 9, np.arange(1024), 1024)
    ahead, counts = np.unique(last - first, return_counts=True)
    assert ahead.tolist() == [1, 2, 4]
    assert counts.tolist() == [512, 256, 256]
    for skip in ahead:
        starts, often = np.unique(first[last - first == skip], return_counts=True)
        assert starts.tolist() == list(range(0, STATES - 1, skip))
        assert often.min() > 0.8 * often.mean()
    assert sum(share for _, share in JUMPS) == 1
    other, _ = draw_jumps(3, 10, np.arange(1024), 1024)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("size", "micro"), [(1, 16), (2, 5), (2, 1), (4, 20)])
def test_any_split_over_ranks_and_micro_batches_gives_the_same_intervals(size, micro):
    batch = 80
    whole = np.stack(draw_jumps(0, 3, np.arange(batch), batch))
    for rank in range(size):
        for places in Plan.make(0, batch, rank, size, micro).places():
            assert np.array_equal(np.stack(draw_jumps(0, 3, places, batch)), whole[:, places])


def test_the_target_is_the_average_velocity_between_two_states():
    states = exact_states("vp", noise(BATCH))
    first, last = draw_jumps(0, 0, np.arange(BATCH), BATCH)
    batch = jump_batch(states, first, last)
    assert torch.equal(batch.z_BGD, states[torch.arange(BATCH), torch.from_numpy(first)])
    assert torch.equal(batch.t_B, torch.from_numpy(first).float() / 4)
    true = DATA.average_velocity(PATHS["vp"], batch.z_BGD, batch.r_B, batch.t_B)
    torch.testing.assert_close(batch.target_BGD, true, rtol=1e-4, atol=1e-4)
    # One step along the target is the end of the interval.
    reached = batch.z_BGD - (batch.t_B - batch.r_B)[:, None, None] * batch.target_BGD
    torch.testing.assert_close(reached, states[torch.arange(BATCH), torch.from_numpy(last)], rtol=1e-4, atol=1e-4)


def test_errors_are_squares_averaged_over_a_row():
    batch = jump_batch(exact_states("vp", noise(8)), *draw_jumps(0, 0, np.arange(8), 8))
    objective = DistilObjective(small_net(2, 2, 0))
    torch.testing.assert_close(objective.errors(batch), batch.target_BGD.square().mean((1, 2)))
    torch.testing.assert_close(objective(batch, torch.tensor(0.5)), objective.errors(batch).sum() / 2)


def test_a_student_draws_as_the_exact_map_in_1_2_and_4_steps():
    teacher = Exact(DATA, PATHS["vp"], velocity_only=True)
    states = trajectories(teacher, noise(4096, 2))

    def batches(step: int) -> JumpBatch:
        rows = torch.randint(4096, (BATCH,), generator=torch.Generator().manual_seed(step))
        return jump_batch(states[rows], *draw_jumps(0, step, np.arange(BATCH), BATCH))

    student = fit(DistilObjective(small_net(2, 2, 0)), batches, 400, 3e-3)
    start = noise(2000, 3)
    exact = exact_states("vp", start)[:, -1]
    for steps in (1, 2, 4):
        error, untrained = (
            float((follow(net, start, 0.0, 1.0, steps) - exact).norm() / (start - exact).norm())
            for net in (student, small_net(2, 2, 0))
        )
        assert error < 0.3, (steps, error)
        assert untrained == pytest.approx(1)
