"""The cost model held against measured steps: its constants fitted, steps predicted."""
