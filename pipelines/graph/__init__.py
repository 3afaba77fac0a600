"""The graph of stages: `dag` plans, `execute` runs a plan, `room` says what fits at once, `timings` where the time went."""
