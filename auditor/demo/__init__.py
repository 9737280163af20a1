"""The whole story on real text, small enough for a laptop: corpus, model, and the runs."""
