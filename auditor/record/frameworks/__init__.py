"""Recording where a framework owns the loop: one line each."""
