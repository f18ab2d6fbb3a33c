"""What a recording copies before it is replayed; the recording itself needs a GPU (tests/gpu/test_trunk_on_gpu.py)."""

import torch

from rmdm.backbone.recording import Held


def test_values_arrive_in_the_places_they_were_given():
    a, b = torch.zeros(3), torch.ones(2)
    held = Held([a.clone(), b.clone()])
    places = [each.data_ptr() for each in held.tensors]
    for values in ([torch.arange(3.0), torch.arange(2.0)], [a, b], [torch.full((3,), 7.0), b]):
        held.take(values)
        assert all(torch.equal(x, y) for x, y in zip(held.tensors, values, strict=True))
    assert [each.data_ptr() for each in held.tensors] == places


def test_a_change_in_place_is_seen_also_through_a_view():
    a, b = torch.zeros(3), torch.ones(2)
    held = Held([a.clone(), b.clone()])
    held.take([a, b])
    a[1] = 5.0
    b.view(2)[0] = 6.0
    held.take([a, b])
    assert held.tensors[0].tolist() == [0.0, 5.0, 0.0]
    assert held.tensors[1].tolist() == [6.0, 1.0]


def test_what_has_not_changed_is_not_copied_again():
    a, b = torch.zeros(3), torch.ones(2)
    held = Held([a.clone(), b.clone()])
    held.take([a, b])
    held.tensors[0].fill_(9.0)
    held.take([a, torch.zeros(2)])
    assert held.tensors[0].tolist() == [9.0] * 3
    assert held.tensors[1].tolist() == [0.0] * 2
    held.tensors[1].fill_(8.0)
    held.take([a.clone(), b])
    assert held.tensors[0].tolist() == [0.0] * 3


def test_there_may_be_room_for_more_rows():
    held = Held([torch.zeros(5, 2)])
    held.take([torch.ones(3, 2)])
    assert held.tensors[0].sum(dim=1).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]


def test_tensors_of_inference_mode_are_always_copied():
    held = Held([torch.zeros(2)])
    with torch.inference_mode():
        value = torch.ones(2)
        held.take([value])
        value.add_(1)
        held.take([value])
    assert held.tensors[0].tolist() == [2.0, 2.0]


def test_taking_the_same_values_twice_is_fine():
    a = torch.zeros(3)
    held = Held([a.clone()])
    held.take([a])
    held.take([a])
    assert torch.equal(held.tensors[0], a)


def test_a_new_tensor_in_the_place_of_a_forgotten_one_is_copied():
    held = Held([torch.zeros(3)])
    for value in range(20):  # memory of the last one is likely to be taken again
        held.take([torch.full((3,), float(value))])
        assert held.tensors[0].tolist() == [float(value)] * 3
