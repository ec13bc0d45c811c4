"""Names that `trajpack.kernels` exports. The runtime reads this list too."""

from trajpack.kernels.corrections.importance_weights import (
    Correction as Correction,
    Rejection as Rejection,
    importance_weights as importance_weights,
)
from trajpack.kernels.corrections.loss_weights import (
    loss_weights as loss_weights,
)
from trajpack.kernels.corrections.penalties import (
    kl_penalty as kl_penalty,
    overlong_penalty as overlong_penalty,
)
from trajpack.kernels.corrections.staleness import staleness_mask as staleness_mask
from trajpack.kernels.credit.discounted_returns import discounted_returns as discounted_returns
from trajpack.kernels.credit.gae import (
    gae as gae,
    turn_gae as turn_gae,
)
from trajpack.kernels.credit.vtrace import vtrace as vtrace
from trajpack.kernels.groups.group_advantages import group_advantages as group_advantages
from trajpack.kernels.logprobs.token_logprobs import (
    token_logprobs as token_logprobs,
    topk_kl as topk_kl,
)
from trajpack.kernels.rearrange.context_parallel import (
    context_parallel_index as context_parallel_index,
    context_parallel_order as context_parallel_order,
)
from trajpack.kernels.rearrange.pad import pad as pad, unpad as unpad
from trajpack.kernels.rearrange.select_tokens import (
    select_tokens as select_tokens,
)
from trajpack.kernels.reduce.whiten import (
    whiten as whiten,
)
from trajpack.kernels.scan.segment_sum import segment_sum as segment_sum
