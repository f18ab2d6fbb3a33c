"""From shards to checkpoints: the loop, its batches, ranks, optimiser and checkpoints."""
