"""What `trajpack.packing` exports, for type checkers; `trajpack` itself makes it so."""

from trajpack.packing.batch import PackedBatch as PackedBatch
from trajpack.packing.buffer import TrajectoryBuffer as TrajectoryBuffer
from trajpack.packing.buffer import pack as pack
from trajpack.packing.estimators import GAE as GAE
from trajpack.packing.estimators import KLPenalty as KLPenalty
from trajpack.packing.estimators import ReinforcePlusPlus as ReinforcePlusPlus
from trajpack.packing.estimators import TurnGAE as TurnGAE
from trajpack.packing.estimators import TurnReturns as TurnReturns
from trajpack.packing.estimators import VTrace as VTrace
from trajpack.packing.group_estimators import GPG as GPG
from trajpack.packing.group_estimators import GRPO as GRPO
from trajpack.packing.group_estimators import OPO as OPO
from trajpack.packing.group_estimators import RLOO as RLOO
from trajpack.packing.group_estimators import DrGRPO as DrGRPO
from trajpack.packing.group_estimators import GiGPO as GiGPO
from trajpack.packing.group_estimators import MaxRL as MaxRL
from trajpack.packing.group_estimators import PassAtK as PassAtK
from trajpack.packing.group_estimators import ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline
from trajpack.packing.resident import pack_resident as pack_resident
from trajpack.packing.static_batch import StaticBatch as StaticBatch
from trajpack.packing.token_fields import TokenField as TokenField
from trajpack.packing.types import Trajectory as Trajectory
from trajpack.packing.types import Turn as Turn
from trajpack.packing.types import VersionSpan as VersionSpan
from trajpack.packing.unpack import unpack as unpack
