"""From target starts to schedules: decoding, justification, and annealing of targets."""
