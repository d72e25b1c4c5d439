"""The executor: runs schedules on torch.distributed."""
