"""What `trajpack.packing` exports, for type checkers; `trajpack` itself makes it so."""

from trajpack.packing.batch import PackedBatch as PackedBatch
from trajpack.packing.buffer import TrajectoryBuffer as TrajectoryBuffer
from trajpack.packing.buffer import pack as pack
from trajpack.packing.resident import pack_resident as pack_resident
from trajpack.packing.static_batch import StaticBatch as StaticBatch
from trajpack.packing.token_fields import TokenField as TokenField
from trajpack.packing.types import Trajectory as Trajectory
from trajpack.packing.types import Turn as Turn
from trajpack.packing.types import VersionSpan as VersionSpan
from trajpack.packing.unpack import unpack as unpack
