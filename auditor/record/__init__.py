"""The training side: what was consumed (sampler) and what it did to the model (monitor)."""
