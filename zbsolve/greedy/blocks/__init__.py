"""Building blocks: one microbatch's passes with fixed offsets, repeated every period; packed, fitted to memory, searched."""
