"""Several models, each opened again when it fails, within one memory budget."""
