"""A vocabulary split over ranks: output layer, loss and embedding of each rank's shard (see `build.vocabulary`).

Nothing here communicates: what other shards know comes in as values, so that one process can hold all shards.
"""
