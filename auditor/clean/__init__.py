"""From shards to cleaned shards: duplicates, repetition, mixes and the manifest that proves it."""
