"""Model families; `registry.create_model` makes one from a `ModelConfig`."""
