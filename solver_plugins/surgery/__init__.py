"""From a model to its blocks: record a forward pass, match patterns, select what to convert."""
