"""What a run will cost, before anything runs. `forecast` is the whole; the rest is arithmetic by subject."""
