"""What a layout costs: times, bytes and messages of layers, stages and ranks."""
