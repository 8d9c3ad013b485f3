"""The cost of a run, on paper: tokens per step, prefix reuse, FLOPs, memory, hours."""
