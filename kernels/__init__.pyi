"""What `trajpack.kernels` exports, for type checkers; `trajpack` itself makes it so."""

from trajpack.kernels.build import build as build
from trajpack.kernels.context_parallel import context_parallel_index as context_parallel_index
from trajpack.kernels.context_parallel import context_parallel_order as context_parallel_order
from trajpack.kernels.discounted_returns import discounted_returns as discounted_returns
from trajpack.kernels.gae import gae as gae
from trajpack.kernels.gather_words import gather_words as gather_words
from trajpack.kernels.group_advantages import group_advantages as group_advantages
from trajpack.kernels.group_recipes import dr_grpo as dr_grpo
from trajpack.kernels.group_recipes import gpg as gpg
from trajpack.kernels.group_recipes import grpo as grpo
from trajpack.kernels.group_recipes import grpo_pass_at_k as grpo_pass_at_k
from trajpack.kernels.group_recipes import max_rl as max_rl
from trajpack.kernels.group_recipes import opo as opo
from trajpack.kernels.group_recipes import (
    reinforce_plus_plus_baseline as reinforce_plus_plus_baseline,
)
from trajpack.kernels.group_recipes import rloo as rloo
from trajpack.kernels.importance_rules import Correction as Correction
from trajpack.kernels.importance_rules import Rejection as Rejection
from trajpack.kernels.importance_weights import importance_weights as importance_weights
from trajpack.kernels.kl_penalty import kl_penalty as kl_penalty
from trajpack.kernels.loss_weights import loss_denominator as loss_denominator
from trajpack.kernels.loss_weights import loss_weights as loss_weights
from trajpack.kernels.merge_tokens import merge_tokens as merge_tokens
from trajpack.kernels.moments import masked_moments as masked_moments
from trajpack.kernels.moments import moment_sums as moment_sums
from trajpack.kernels.pad import pad as pad
from trajpack.kernels.reward_shaping import overlong_penalty as overlong_penalty
from trajpack.kernels.segment_reduce import segment_max as segment_max
from trajpack.kernels.segment_reduce import segment_mean as segment_mean
from trajpack.kernels.segment_reduce import segment_sum as segment_sum
from trajpack.kernels.select_tokens import select_tokens as select_tokens
from trajpack.kernels.shift import drop_tokens as drop_tokens
from trajpack.kernels.shift import shift_tokens as shift_tokens
from trajpack.kernels.staleness import policy_age as policy_age
from trajpack.kernels.staleness import staleness_mask as staleness_mask
from trajpack.kernels.staleness import staleness_weights as staleness_weights
from trajpack.kernels.step_groups import step_advantages as step_advantages
from trajpack.kernels.td_lambda import td_lambda as td_lambda
from trajpack.kernels.turn_gae import turn_gae as turn_gae
from trajpack.kernels.unpad import unpad as unpad
from trajpack.kernels.vtrace import vtrace as vtrace
from trajpack.kernels.whiten import whiten as whiten
