"""What `trajpack.kernels` exports, for type checkers; `trajpack` itself makes it so."""

from trajpack.kernels.build import build as build
from trajpack.kernels.discounted_returns import discounted_returns as discounted_returns
