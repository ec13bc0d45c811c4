"""What `trajpack.kernels` exports, for type checkers; `trajpack` itself makes it so."""

from trajpack.kernels.build import build as build
from trajpack.kernels.discounted_returns import discounted_returns as discounted_returns
from trajpack.kernels.gather_words import gather_words as gather_words
from trajpack.kernels.pad import pad as pad
from trajpack.kernels.unpad import unpad as unpad
