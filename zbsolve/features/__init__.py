"""Features of a training step: what it may have beside its plain passes, each as one value."""
