"""Steps of very many microbatches, said once: a schedule of few, one round of which is repeated."""
