"""What ``trajpack`` hands out, for type checkers."""

from trajpack import agent as agent
from trajpack import kernels as kernels
from trajpack import packing as packing
from trajpack.kernels.corrections.importance_rules import Correction as Correction
from trajpack.kernels.corrections.importance_rules import Rejection as Rejection
from trajpack.packing.batch.batch import PackedBatch as PackedBatch
from trajpack.packing.batch.unpack import unpack as unpack
from trajpack.packing.buffer.buffer import TrajectoryBuffer as TrajectoryBuffer
from trajpack.packing.buffer.buffer import pack as pack
from trajpack.packing.buffer.resident import pack_resident as pack_resident
from trajpack.packing.buffer.static_batch import StaticBatch as StaticBatch
from trajpack.packing.credit.estimators import GAE as GAE
from trajpack.packing.credit.estimators import KLPenalty as KLPenalty
from trajpack.packing.credit.estimators import ReinforcePlusPlus as ReinforcePlusPlus
from trajpack.packing.credit.estimators import TurnGAE as TurnGAE
from trajpack.packing.credit.estimators import TurnReturns as TurnReturns
from trajpack.packing.credit.estimators import VTrace as VTrace
from trajpack.packing.credit.group_estimators import GPG as GPG
from trajpack.packing.credit.group_estimators import GRPO as GRPO
from trajpack.packing.credit.group_estimators import OPO as OPO
from trajpack.packing.credit.group_estimators import RLOO as RLOO
from trajpack.packing.credit.group_estimators import DrGRPO as DrGRPO
from trajpack.packing.credit.group_estimators import GiGPO as GiGPO
from trajpack.packing.credit.group_estimators import MaxRL as MaxRL
from trajpack.packing.credit.group_estimators import PassAtK as PassAtK
from trajpack.packing.credit.group_estimators import (
    ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline,
)
from trajpack.packing.micro_batches.alignment import Alignment as Alignment
from trajpack.packing.micro_batches.micro_batch import MicroBatch as MicroBatch
from trajpack.packing.plan.costs import TransformerCost as TransformerCost
from trajpack.packing.plan.plan import Plan as Plan
from trajpack.packing.plan.plan import plan_micro_batches as plan_micro_batches
from trajpack.packing.plan.ranks import RankPlan as RankPlan
from trajpack.packing.plan.ranks import plan_ranks as plan_ranks
from trajpack.packing.token_fields import TokenField as TokenField
from trajpack.packing.trajectory_log.log import LoggedEpisode as LoggedEpisode
from trajpack.packing.trajectory_log.log import TrajectoryLog as TrajectoryLog
from trajpack.packing.trajectory_log.options import DamagedLogError as DamagedLogError
from trajpack.packing.trajectory_log.options import LogInUseError as LogInUseError
from trajpack.packing.trajectory_log.options import LogOptions as LogOptions
from trajpack.packing.types import Trajectory as Trajectory
from trajpack.packing.types import Turn as Turn
from trajpack.packing.types import VersionSpan as VersionSpan

__version__: str
