"""Names that `trajpack.packing` exports. The runtime reads this list too."""

from trajpack.packing import adapters as adapters
from trajpack.packing.batch.batch import PackedBatch as PackedBatch
from trajpack.packing.buffer.buffer import TrajectoryBuffer as TrajectoryBuffer, pack as pack
from trajpack.packing.buffer.resident import pack_resident as pack_resident
from trajpack.packing.captured_calls import (
    trajectories_from_calls as trajectories_from_calls,
)
from trajpack.packing.credit.estimators import (
    GAE as GAE,
    GRPO as GRPO,
    RLOO as RLOO,
    DrGRPO as DrGRPO,
    GiGPO as GiGPO,
    GroupEstimator as GroupEstimator,
    KLPenalty as KLPenalty,
    ReinforcePlusPlus as ReinforcePlusPlus,
    TurnGAE as TurnGAE,
    TurnReturns as TurnReturns,
    VTrace as VTrace,
)
from trajpack.packing.files.storage import (
    load as load,
    load_tree as load_tree,
    save as save,
)
from trajpack.packing.loader.dataset import PackedDataset as PackedDataset
from trajpack.packing.micro_batches.alignment import Alignment as Alignment
from trajpack.packing.micro_batches.micro_batch import MicroBatch as MicroBatch
from trajpack.packing.plan.costs import TransformerCost as TransformerCost
from trajpack.packing.plan.plan import (
    plan_micro_batches as plan_micro_batches,
    plan_ranks as plan_ranks,
)
from trajpack.packing.plan.types import Plan as Plan
from trajpack.packing.report.page import write_report as write_report
from trajpack.packing.token_fields import TokenField as TokenField
from trajpack.packing.trajectory_log.log import TrajectoryLog as TrajectoryLog
from trajpack.packing.trajectory_log.records import DamagedLogError as DamagedLogError
from trajpack.packing.tree.pack_tree import pack_tree as pack_tree
from trajpack.packing.tree.tree_batch import TreeBatch as TreeBatch
from trajpack.packing.types import Trajectory as Trajectory, Turn as Turn
