"""Puts the make-believe GPUs into torch: what `torch.cuda` has in a build for GPUs, as far as zbsolve uses it."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._device import _device_constructors

COUNT = int(os.environ["MAKE_BELIEVE_GPUS"])
MEMORY = 8 << 30


def _built() -> Any:
    path = os.environ["MAKE_BELIEVE_BUILT"] + "/make_believe_device.so"
    spec = importlib.util.spec_from_file_location("make_believe_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _built()


def number(given: Any = None) -> int:
    """Of a device as torch takes it: None, a number, a name, a torch.device."""
    if isinstance(given, int):
        return given
    index = None if given is None else torch.device(given).index
    return int(device.device() if index is None else index)


class Stream:
    """By its number; 0 is the default one."""

    def __init__(self, on: Any = None, priority: int = 0, number_of: int | None = None, **_: Any) -> None:
        self.device, self.cuda_stream = torch.device("cuda", number(on)), number_of
        if number_of is None:
            self.cuda_stream = device.new_stream()

    def wait_event(self, event: Event) -> None:
        assert event.recorded is not None, "a wait for an event that was not recorded"
        assert not (event.external and device.is_capturing()), "an event with a time in a graph that something waits for"
        device.wait(self.cuda_stream, event.moment)

    def wait_stream(self, other: Stream) -> None:
        device.wait(self.cuda_stream, device.record(other.cuda_stream))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        if device.is_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """recorded: when, ns; None: never; 0: in a graph that was not replayed yet."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.timed, self.external = enable_timing, external
        self.recorded: int | None = None
        self.moment: Any = None
        self.inside = False  # of a graph, which says nothing of it

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self.moment = device.record(device.stream() if stream is None else stream.cuda_stream)
        self.inside = device.is_capturing() and not self.external
        self.on = (stream or current_stream()).device.index
        if not device.is_capturing():
            self._now()
            return
        assert self.external or not self.timed, "an event with a time that a graph captures has to be external"
        self.recorded = self.recorded or 0
        if self.external:
            device.log(self._now)

    def _now(self) -> None:
        self.recorded = time.perf_counter_ns()

    def query(self) -> bool:
        self._over(False)
        return True

    def synchronize(self) -> None:
        self._over(True)

    def _over(self, everybody: bool) -> None:
        if device.is_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.inside:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        if self.moment is not None:
            if self.on != device.device():
                print(
                    f"race: a thread on GPU {device.device()} asks for an event on GPU {self.on}",
                    file=sys.stderr,
                    flush=True,
                )
            device.hear(self.moment, everybody)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, other: Event) -> float:
        assert self.timed, "an event without a time"
        assert other.timed, "an event without a time"
        if not self.recorded or not other.recorded:
            raise RuntimeError("an event that was not recorded")
        return (other.recorded - self.recorded) / 1e6


class OnStream:
    """`torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = device.stream()
        if self.stream is not None:
            device.set_stream(self.stream.cuda_stream)

    def __exit__(self, *_: object) -> None:
        device.set_stream(self.before)


def default_stream(on: Any = None) -> Stream:
    return Stream(on, number_of=0)


def current_stream(on: Any = None) -> Stream:
    return Stream(on, number_of=device.stream())


def set_stream(stream: Stream) -> None:
    device.set_stream(stream.cuda_stream)


def synchronize(on: Any = None) -> None:
    if device.is_capturing():
        raise RuntimeError("operation not permitted when stream is capturing")
    device.hear_all()


class OnDevice:
    """`torch.cuda.device`."""

    def __init__(self, on: Any) -> None:
        self.index = number(on)

    def __enter__(self) -> None:
        self.before = device.device()
        device.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        device.set_device(self.before)


class Graph:
    """`torch.cuda.CUDAGraph`."""

    live: weakref.WeakSet[Graph] = weakref.WeakSet()

    def __init__(self, keep_graph: bool = False) -> None:
        self.log = device.Graph()
        self.live.add(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.log.register(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.log.register(device.drawer())
        device.begin(self.log)

    def capture_end(self) -> None:
        device.end()

    def replay(self) -> None:
        self.log.replay()

    def reset(self) -> None:
        self.log = None

    def pool(self) -> tuple[int, int]:
        return 0, 1


class Capturing:
    """`torch.cuda.graph`."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "") -> None:
        self.graph, self.stream = graph, OnStream(stream or Stream())

    def __enter__(self) -> None:
        synchronize()  # as torch does
        self.stream.__enter__()
        self.graph.capture_begin()

    def __exit__(self, *_: object) -> None:
        self.graph.capture_end()
        self.stream.__exit__()


Own = torch.Generator


class Generator(Own):  # type: ignore[misc]
    """On any device; a CPU's draws for it."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return Own.__new__(cls, "cpu")  # type: ignore[return-value]

    def __init__(self, device: Any = "cpu") -> None: ...

    def graphsafe_get_state(self) -> torch.Generator:
        return self

    def get_offset(self) -> int:
        return 0


class DeviceGenerator:
    """The devices' own, whose state may be another generator's. Its offset says whether it drew since it was seeded."""

    device = torch.device("cuda", 0)
    seeded: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(device.drawer(), name)

    def manual_seed(self, seed: int) -> DeviceGenerator:
        device.drawer().manual_seed(seed)
        self.seeded = self.get_state().clone()
        return self

    def set_state(self, state: torch.Tensor) -> None:
        device.drawer().set_state(state)
        self.seeded = state.clone()

    def get_offset(self) -> int:
        return 0 if self.seeded is not None and torch.equal(self.seeded, self.get_state()) else 4

    def graphsafe_get_state(self) -> torch.Generator:
        return device.drawer()  # type: ignore[no-any-return]

    def graphsafe_set_state(self, generator: torch.Generator) -> None:
        device.set_drawer(generator)


class Properties:
    name, total_memory, major, minor, multi_processor_count, L2_cache_size = "make-believe GPU", MEMORY, 9, 0, 132, 1 << 20
    uuid = "make-believe"


class Nccl(device.Nccl):  # type: ignore[misc, name-defined]
    """`ProcessGroupNCCL`, over gloo."""

    class Options:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._timeout = c10d.default_pg_timeout

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Nccl:
        return device.Nccl.__new__(cls)  # type: ignore[no-any-return]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        super().__init__(self.gloo, rank, size)
        self.options = options
        KEPT.append(self)

    def abort(self) -> None:
        if any(graph.log is not None and graph.log.uses(self) for graph in list(Graph.live)):
            print("race: a communicator would not end, because a graph has its messages", file=sys.stderr, flush=True)

    shutdown = abort

    def _set_default_timeout(self, timeout: Any) -> None:
        self.gloo._set_default_timeout(timeout)


KEPT: list[Nccl] = []  # torch holds the C++ part alone


PINNED: list[torch.Tensor] = []  # for good, so that no other memory is taken for it


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host that copies run to and from beside computing."""
    if not any(one.data_ptr() == tensor.data_ptr() for one in PINNED):
        PINNED.append(tensor)
        device.pinned(tensor.data_ptr(), tensor.nbytes)
    return tensor


def pinning(make: Any) -> Any:
    """A function that makes tensors."""

    def made(*given: Any, pin_memory: bool = False, **more: Any) -> Any:
        return pinned(make(*given, **more)) if pin_memory else make(*given, **more)

    return made


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    assert tensor.is_cuda
    device.record_stream(tensor.data_ptr(), stream.cuda_stream)


def pass_that_runs() -> str:
    """Of the thread that asks, as the interpreter knows it."""
    frame = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "run" and "interpreter" in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else str(frame.f_locals["action"].name)


def put(place: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(place, name, value)


def limit_memory(fraction: float, on: Any = None) -> None:
    assert isinstance(fraction, float), "torch takes no other number"
    assert 0 <= fraction <= 1


OWN = DeviceGenerator()
put(
    torch.cuda,
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_compiled=lambda: True,
    init=lambda: None,
    _lazy_init=lambda: None,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: COUNT,
    current_device=device.device,
    set_device=lambda on: device.set_device(number(on)),
    device=OnDevice,
    Stream=Stream,
    Event=Event,
    stream=OnStream,
    StreamContext=OnStream,
    synchronize=synchronize,
    current_stream=current_stream,
    default_stream=default_stream,
    set_stream=set_stream,
    CUDAGraph=Graph,
    graph=Capturing,
    graph_pool_handle=lambda: (0, 1),
    is_current_stream_capturing=device.is_capturing,
    empty_cache=lambda: None,
    get_device_properties=lambda on=None: Properties(),
    get_device_name=lambda on=None: Properties.name,
    get_device_capability=lambda on=None: (9, 0),
    clock_rate=lambda on=None: 1980,
    memory_allocated=lambda on=None: device.allocated(),
    max_memory_allocated=lambda on=None: device.peak(),
    reset_peak_memory_stats=lambda on=None: device.reset_peak(),
    memory_stats=lambda on=None: {},
    memory_stats_as_nested_dict=lambda on=None: {
        "allocated_bytes": {"all": {"current": device.allocated(), "peak": device.peak()}}
    },
    mem_get_info=lambda on=None: (MEMORY - device.allocated(), MEMORY),
    set_per_process_memory_fraction=limit_memory,
    is_bf16_supported=lambda *_, **__: True,
    default_generators=(OWN,) * COUNT,
    manual_seed=OWN.manual_seed,
    manual_seed_all=OWN.manual_seed,
    get_rng_state=lambda on=None: OWN.get_state(),
    set_rng_state=lambda state, on=None: OWN.set_state(state),
    _sleep=lambda cycles: None,
)
put(torch.cuda.graphs, CUDAGraph=Graph, graph=Capturing)
put(torch.cuda.random, manual_seed=OWN.manual_seed, manual_seed_all=OWN.manual_seed)
put(torch, Generator=Generator)
_device_constructors()  # torch remembers them, and so knows these in `with device:`
put(torch, **{name: pinning(getattr(torch, name)) for name in ("empty", "zeros", "ones", "empty_strided", "empty_like")})
put(
    torch.Tensor,
    pin_memory=lambda self, *_: pinned(self.clone()),
    is_pinned=lambda self, *_: True,
    record_stream=record_stream,
)
put(
    torch._C,
    **{f"_cuda_{name}": lambda *_: 0 for name in ("getCurrentRawStream", "exchangeDevice", "maybeExchangeDevice")},
    _cuda_setDevice=device.set_device,
    _cuda_getDevice=device.device,
    _cuda_getDeviceCount=lambda: COUNT,
    _cuda_isCurrentStreamCapturing=device.is_capturing,
)
put(c10d, ProcessGroupNCCL=Nccl, _NCCL_AVAILABLE=True, is_nccl_available=lambda: True)
put(c10d, default_pg_nccl_timeout=c10d.default_pg_nccl_timeout or c10d.default_pg_timeout)
put(dist, ProcessGroupNCCL=Nccl, is_nccl_available=lambda: True)
device.in_pass(pass_that_runs)
