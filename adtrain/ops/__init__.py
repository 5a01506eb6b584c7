"""All operations. One file per family: public function, shape rule, NumPy reference, vjp rules, cost. No kernels."""

import sys

import adtrain.ops.channels_last  # primitives that passes look up
from adtrain.core.array import bind_operators
from adtrain.core.precision import matmul_precision as matmul_precision
from adtrain.ops.attention import *
from adtrain.ops.collectives import *
from adtrain.ops.common import *
from adtrain.ops.compare import *
from adtrain.ops.conv import *
from adtrain.ops.create import *
from adtrain.ops.elementwise import *
from adtrain.ops.hash_grid import *
from adtrain.ops.index import *
from adtrain.ops.linalg import *
from adtrain.ops.loss import *
from adtrain.ops.matmul import *
from adtrain.ops.normalisation import *
from adtrain.ops.pool import *
from adtrain.ops.rearrange import *
from adtrain.ops.recurrent import *
from adtrain.ops.reduce import *
from adtrain.ops.shape import *

bind_operators(sys.modules[__name__])

__all__ = [name for name, x in sorted(vars().items()) if callable(x) and x is not bind_operators]
