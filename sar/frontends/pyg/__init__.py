"""What PyG's models see of the library: mini-batches, so far."""
