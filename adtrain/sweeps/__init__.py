"""Sweeps: many trainings of one config, whose settings and seeds differ, as one Program for each shape of network."""
