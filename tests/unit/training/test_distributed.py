from rmdm.training.distributed import gpu_of


def test_every_rank_has_a_gpu_of_its_own_while_there_are_enough() -> None:
    assert [gpu_of(local, 4, 8) for local in range(4)] == [(local, "cpu:gloo,cuda:nccl") for local in range(4)]


def test_more_ranks_than_gpus_share_them_and_meet_without_nccl() -> None:
    assert [gpu_of(local, 5, 2) for local in range(5)] == [(local % 2, "gloo") for local in range(5)]
