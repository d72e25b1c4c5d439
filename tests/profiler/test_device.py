"""Which device a process computes on."""

import pytest
import torch

from profiler import measure
from zbsolve.exec.choices import choose, described, device_of
from zbsolve.util.errors import BadInput


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch say that so many GPUs are there."""

    def count(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")

    return count


@pytest.mark.parametrize(
    ("number", "asked", "ranks", "share", "kind"),
    [
        (0, "auto", 1, False, "cpu"),
        (0, "auto", 1, True, "cpu"),
        (1, "auto", 1, False, "cuda"),
        (1, "auto", 2, False, "cpu"),
        (1, "auto", 2, True, "cuda"),
        (2, "cuda", 2, False, "cuda"),
        (8, "cpu", 1, False, "cpu"),
    ],
)
def test_auto_takes_gpus_where_each_rank_has_one(gpus, number, asked, ranks, share, kind):
    gpus(number)
    assert choose(asked, ranks, share) == kind


@pytest.mark.parametrize(
    ("number", "asked", "ranks", "words"),
    [(0, "cuda", 1, "no CUDA device"), (1, "cuda", 2, "--share-gpus"), (1, "gpu", 1, "auto, cuda, cpu")],
)
def test_what_is_asked_for_and_not_there_is_refused(gpus, number, asked, ranks, words):
    gpus(number)
    with pytest.raises(BadInput, match=words):
        choose(asked, ranks)


@pytest.mark.parametrize(
    ("asked", "words"),
    [("cuda:x", "as in cuda:1"), ("cuda:", "as in cuda:1"), ("cpu:1", "as in cuda:1"), ("cuda:2", "up to cuda:1")],
)
def test_a_number_of_no_gpu_is_refused(gpus, asked, words):
    gpus(2)
    with pytest.raises(BadInput, match=words):
        measure("mlp-tiny", device=asked)


def test_ranks_take_the_gpu_of_their_number_and_share_them_in_turn(gpus):
    gpus(2)
    assert device_of("cpu", 3) == torch.device("cpu")
    assert [device_of("cuda", rank) for rank in range(2)] == [torch.device("cuda", i) for i in range(2)]
    assert [device_of("cuda", rank, share=True).index for rank in range(4)] == [0, 1, 0, 1]
    assert described(device_of("cuda", 1)) == "cuda:1, card 1"
    assert described(torch.device("cpu")) == "cpu"
