"""Steps of very many microbatches."""
