"""Gradients that several ranks hold: over the ranks that share a stage or a tied parameter, and over replicas."""
