"""Offload at run time: what a microbatch keeps on a stage goes to host memory and comes back (see `build.offload`)."""
