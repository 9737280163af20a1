"""From recorded facts to an explanation: grades, events, attribution, diagnosis. Polars only."""
