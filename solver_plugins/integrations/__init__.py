"""Where the package meets timm and transformers. Nothing here imports a host until it is needed."""
