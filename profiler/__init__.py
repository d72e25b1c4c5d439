"""The profiler: measures a model's layers and the links between ranks with the executor that will run the schedule."""
