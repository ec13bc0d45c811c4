"""Names that `trajpack.kernels` exports. The runtime reads this list too."""

from trajpack.kernels.compilation import prewarm as prewarm
from trajpack.kernels.corrections.importance_weights import (
    Correction as Correction,
    Rejection as Rejection,
    importance_weights as importance_weights,
)
from trajpack.kernels.corrections.loss_weights import (
    loss_denominator as loss_denominator,
    loss_weights as loss_weights,
)
from trajpack.kernels.corrections.penalties import (
    kl_penalty as kl_penalty,
    overlong_penalty as overlong_penalty,
)
from trajpack.kernels.corrections.staleness import (
    policy_age as policy_age,
    staleness_mask as staleness_mask,
    staleness_weights as staleness_weights,
)
from trajpack.kernels.credit.discounted_returns import discounted_returns as discounted_returns
from trajpack.kernels.credit.gae import (
    gae as gae,
    td_lambda as td_lambda,
    turn_gae as turn_gae,
)
from trajpack.kernels.credit.vtrace import vtrace as vtrace
from trajpack.kernels.fields.build import build as build
from trajpack.kernels.groups.group_advantages import group_advantages as group_advantages
from trajpack.kernels.groups.group_recipes import (
    dr_grpo as dr_grpo,
    gpg as gpg,
    grpo as grpo,
    grpo_pass_at_k as grpo_pass_at_k,
    max_rl as max_rl,
    opo as opo,
    reinforce_plus_plus_baseline as reinforce_plus_plus_baseline,
    rloo as rloo,
    step_advantages as step_advantages,
)
from trajpack.kernels.logprobs.token_logprobs import (
    token_logprobs as token_logprobs,
    topk_kl as topk_kl,
)
from trajpack.kernels.rearrange.context_parallel import (
    context_parallel_index as context_parallel_index,
    context_parallel_order as context_parallel_order,
)
from trajpack.kernels.rearrange.pad import pad as pad, unpad as unpad
from trajpack.kernels.rearrange.repeat_rows import repeat_rows as repeat_rows
from trajpack.kernels.rearrange.select_tokens import (
    merge_tokens as merge_tokens,
    select_tokens as select_tokens,
)
from trajpack.kernels.rearrange.shift import (
    drop_tokens as drop_tokens,
    shift_tokens as shift_tokens,
)
from trajpack.kernels.reduce.segment_reduce import (
    segment_max as segment_max,
    segment_mean as segment_mean,
    segment_sum as segment_sum,
)
from trajpack.kernels.reduce.whiten import (
    masked_moments as masked_moments,
    moment_sums as moment_sums,
    whiten as whiten,
)
