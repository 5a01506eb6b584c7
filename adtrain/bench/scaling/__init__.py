"""How the time of a training step grows with the number of ranks."""
