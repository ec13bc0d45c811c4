"""Names that ``trajpack`` exports: those of `trajpack.packing`, and two of `trajpack.kernels`."""

from trajpack import (
    agent as agent,
    kernels as kernels,
    packing as packing,
    testing as testing,
)
from trajpack.kernels.corrections.importance_weights import (
    Correction as Correction,
    Rejection as Rejection,
)
from trajpack.packing import *

__version__: str
