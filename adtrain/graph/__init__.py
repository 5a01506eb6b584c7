"""Pictures of a network's layers, or of the equations of its training step, in Graphviz's DOT language."""

from adtrain.graph.dot import svg
from adtrain.graph.network import network_dot
from adtrain.graph.program import program_dot
from adtrain.graph.steps import step_program

__all__ = ["network_dot", "program_dot", "step_program", "svg"]
