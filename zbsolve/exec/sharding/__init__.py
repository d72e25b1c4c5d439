"""Stages whose parameters are sharded (FSDP2): gathering and releasing them, and reducing their gradients."""
