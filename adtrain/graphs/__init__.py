"""Graphs of networks, training steps and functions: SVG, PNG, an interactive page, Graphviz's DOT, and text."""

from adtrain.graphs.details import first_batch_inputs
from adtrain.graphs.network import network_graph
from adtrain.graphs.picture import FORMATS, Graph, checked_format
from adtrain.graphs.step import SIMPLIFIED, graph, step_graph

__all__ = [
    "FORMATS",
    "SIMPLIFIED",
    "Graph",
    "checked_format",
    "first_batch_inputs",
    "graph",
    "network_graph",
    "step_graph",
]
