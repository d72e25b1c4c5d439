"""Bounds of a layout's step that hold for every partition, and of the whole space."""
