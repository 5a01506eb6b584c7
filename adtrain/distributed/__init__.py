"""Several processes that train one network: how they are started, find each other, exchange arrays, and end together.

A process of a job is a rank; ranks are numbered from 0, as in MPI.
"""
