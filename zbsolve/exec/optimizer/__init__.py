"""Optimizer steps that wait for no other rank."""
