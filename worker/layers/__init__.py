"""Layers of a tensor-parallel decoder: each holds its rank's shard and knows where the checkpoint keeps it."""
