"""A mesh of devices around a pipeline: this rank's place in it, and what a person's function does to stages over its other
dimensions."""
