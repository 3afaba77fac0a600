"""Stage `roundN/trajectories`: greedy answers to the training prompts, with the Jacobi states of their blocks. See `stage`."""
