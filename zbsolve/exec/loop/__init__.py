"""The rest of a training loop around a pipeline's steps: clipping, loss scaling, evaluation, checkpoints. Its functions take
a pipeline first, and are methods of `Pipeline`."""
