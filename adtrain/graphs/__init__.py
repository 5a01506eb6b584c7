"""Graphs of networks, training steps and functions: SVG, PNG, an interactive page, Graphviz's DOT, and text."""

from adtrain.graphs.formats import FORMATS, Graph, checked_format
from adtrain.graphs.network import network_graph
from adtrain.graphs.step import SIMPLIFIED, graph, step_graph
from adtrain.graphs.values import step_arguments

__all__ = ["FORMATS", "SIMPLIFIED", "Graph", "checked_format", "graph", "network_graph", "step_arguments", "step_graph"]
