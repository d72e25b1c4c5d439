"""A vocabulary split over ranks: output layer, loss and embedding of each rank's shard (see `build.vocabulary`).

`shard`, `parts` and `loss` do not communicate: values of other shards are arguments, so one process can hold all shards.
`parts` takes a rank's shard out of a model; `rank` has what its passes run.
"""
