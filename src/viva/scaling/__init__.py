"""What a run costs, on paper: tokens per step, prefix reuse, FLOPs, memory, hours."""
