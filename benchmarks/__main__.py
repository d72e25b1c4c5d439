"""`make bench`: what building, simulating and verifying take on this machine (`python -m benchmarks.sizes`)."""

from .sizes import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.main()
