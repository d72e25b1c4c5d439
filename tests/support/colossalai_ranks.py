"""ColossalAI's own executor (`ZeroBubbleVPipeScheduler`) on threads: its buffers and the order of its calls are real;
models, tensors and the network are stand-ins that only say which microbatch they are."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import Any

LIMIT = 300
_here = threading.local()


class Network:
    """Messages between ranks: each pair's arrive in the order in which they were sent, both ways of the step in one line."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.asked: dict[tuple[int, int], int] = defaultdict(int)
        self.changed = threading.Condition()

    def send(self, a: int, b: int, what: Any) -> None:
        with self.changed:
            self.lines[a, b].append(what)
            self.changed.notify_all()

    def receive(self, a: int, b: int) -> tuple[dict[str, Any], list[Any]]:
        """An empty box, and the handle that fills it."""
        with self.changed:
            place = self.asked[a, b]
            self.asked[a, b] += 1
        return (box := {}), [Handle(self, (a, b), place, box)]


class Handle:
    """A receive under way."""

    def __init__(self, network: Network, pair: tuple[int, int], place: int, box: dict[str, Any]) -> None:
        self.network, self.pair, self.place, self.box = network, pair, place, box

    def wait(self) -> None:
        with self.network.changed:
            there = self.network.changed.wait_for(lambda: len(self.network.lines[self.pair]) > self.place, LIMIT)
            assert there, f"rank {self.pair[1]} waits for ever for rank {self.pair[0]}"
            self.box.update(self.network.lines[self.pair][self.place])


class Comm:
    """What the scheduler calls to send and receive."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def recv_forward(self, prev_rank: int, metadata_recv: Any = None) -> Any:
        return self.network.receive(prev_rank, self.rank)

    def recv_backward(self, next_rank: int, metadata_recv: Any = None) -> Any:
        return self.network.receive(next_rank, self.rank)

    def send_forward(self, output_object: Any, next_rank: int, send_metadata: bool = True) -> list[Any]:
        self.network.send(self.rank, next_rank, output_object)
        return []

    def send_backward(self, input_object: Any, prev_rank: int, send_metadata: bool = True) -> list[Any]:
        self.network.send(self.rank, prev_rank, input_object)
        return []


class StageManager:
    """Where a rank stands."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage, self.num_stages = rank, ranks

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        return self.stage == self.num_stages - 1

    def get_prev_rank(self) -> int:
        return self.stage - 1

    def get_next_rank(self) -> int:
        return self.stage + 1

    @contextmanager
    def switch_model_chunk_id(self, chunk: int) -> Any:
        yield


class WeightGradStore:
    """ColossalAI's queue of weight gradients, one a rank."""

    @classmethod
    def flush(cls, chunk: int = 0) -> None:
        _here.waiting[chunk].append(_here.last)

    @classmethod
    def pop(cls, chunk: int = 0) -> None:
        _here.ran.append(("W", chunk, _here.waiting[chunk].popleft()))


def run(scheduler: type, nodes: list[list[Any]], microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Each rank's passes (type, chunk, microbatch) as the executor really took them, by what its buffers held."""
    network, ranks = Network(), len(nodes)
    found: list[list[tuple[str, int, int]]] = [[] for _ in nodes]
    failed: list[BaseException] = []

    class Recorded(scheduler):  # type: ignore[misc]
        def load_batch(self, data_iter: Any, device: Any = None) -> None:
            self.offset = [0, 0]

        def load_micro_batch(self, model_chunk_id: int) -> int:
            self.offset[model_chunk_id] += 1
            return self.offset[model_chunk_id] - 1

        def forward_step(self, model_chunk: Any, model_chunk_id: int, micro_batch: int, input_obj: Any, **_: Any) -> Any:
            assert input_obj is None or input_obj["microbatch"] == micro_batch
            _here.ran.append(("F", model_chunk_id, micro_batch))
            return {"microbatch": micro_batch}

        def backward_b_step(self, model_chunk_id: int, output_obj: Any, output_obj_grad: Any, **_: Any) -> Any:
            m = output_obj["microbatch"]
            assert output_obj_grad is None or output_obj_grad["microbatch"] == m
            _here.ran.append(("B", model_chunk_id, m))
            _here.last = m
            return {"microbatch": m}

    def rank(r: int) -> None:
        try:
            _here.ran, _here.waiting = found[r], (deque(), deque())
            one = Recorded(StageManager(r, ranks), nodes, 2, microbatches)
            one.comm = Comm(network, r)
            one.forward_only = False
            one.run_forward_backward(None, None, None)
            one.assert_buffer_empty()
            assert not any(_here.waiting)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    if failed:
        raise failed[0]
    return found


def stand_ins(base: type) -> dict[str, dict[str, Any]]:
    """What `zero_bubble_pp.py` imports beside torch and `v_schedule.py`; base: of the scheduler."""

    def same(x: Any, *_: Any) -> Any:
        return x

    helpers = ("clone", "detach", "get_batch_size", "get_micro_batch", "merge_batch", "model_forward")
    more = ("release_tensor_data", "require_grad", "retain_grad", "to_device")
    return {
        "colossalai.accelerator": {"get_accelerator": None},
        "colossalai.interface": {"OptimizerWrapper": object},
        "colossalai.pipeline.p2p": {"PipelineP2PCommunication": lambda *_, **__: None, "create_send_metadata": same},
        "colossalai.pipeline.stage_manager": {"PipelineStageManager": StageManager},
        "colossalai.pipeline.weight_grad_store": {"WeightGradStore": WeightGradStore},
        "colossalai.pipeline.schedule._utils": dict.fromkeys((*helpers, *more), same),
        "colossalai.pipeline.schedule.base": {"PipelineSchedule": base},
    }


class Base:
    """ColossalAI's PipelineSchedule."""

    def __init__(self, stage_manager: StageManager) -> None:
        self.stage_manager = stage_manager
