"""A make-believe GPU: torch's "cuda" in host memory, for the paths that only GPUs take. Not for CI (it compiles C++ for
half a minute or more): `python -m tests.make_believe_gpu` builds it and runs the checks, each against the unsplit model.

Every operation runs on the CPU at once (`device.cpp`). Memory that nobody wrote is NaN. Streams and events are there, and a
wait for an event that was never recorded fails; times are the host's, and mean nothing. A captured graph is a log that each
replay runs again, and what a capture forbids is refused while one is made. NCCL's communicators are gloo's. It shows wrong
values, wrong calls and what is not captured. It does not show races, NCCL's deadlocks, inductor or FSDP2.
"""
