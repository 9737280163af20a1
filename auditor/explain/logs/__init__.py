"""Training logs of other tools, read into run directories: losses, norms, rates, no exposures."""
