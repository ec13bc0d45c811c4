"""Turns of LLM agents, packed into training batches on the device."""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

try:
    import trajpack.agent
    import trajpack.kernels
    import trajpack.packing
except ModuleNotFoundError as _error:
    if _error.name not in ("trajpack.agent", "trajpack.kernels", "trajpack.packing"):
        raise
    raise ImportError(
        f"{_error.name} is not there: this copy of the source has lost the symbolic links "
        "src/trajpack/kernels, src/trajpack/packing and src/trajpack/agent to the folders "
        "kernels, packing and agent; clone it with git (on Windows after `git config --global "
        "core.symlinks true`), or unpack it with tar"
    ) from None

__version__ = "0.1.0"


class _Layer(_ModuleType):
    """A layer, in which an op stands where the import of its module puts that of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, _ModuleType) and name in self.__all__:
            value = getattr(value, name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


def _export(layer: _ModuleType, names: dict[str, str]) -> None:
    """Let a module hand out names of modules below it, which are imported when they are asked for.

    Args:
        layer: Gets ``__all__``.
        names: For each name the module that defines it, without that of the layer.
    """

    def get(name: str) -> object:
        if name in names:
            return getattr(_import_module(f"{layer.__name__}.{names[name]}"), name)
        if not name.startswith("_"):
            path = f"{layer.__name__}.{name}"
            try:
                return _import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        raise AttributeError(f"module {layer.__name__!r} has no attribute {name!r}")

    layer.__dict__.update(__all__=sorted(names), __getattr__=get)
    layer.__class__ = _Layer
    for name, module in names.items():
        loaded = layer.__dict__.get(name)
        if name == module and isinstance(loaded, _ModuleType):
            setattr(layer, name, loaded)


_export(
    trajpack.kernels,
    {
        "Correction": "importance_rules",
        "Rejection": "importance_rules",
        "build": "build",
        "discounted_returns": "discounted_returns",
        "gae": "gae",
        "gather_words": "gather_words",
        "group_advantages": "group_advantages",
        "dr_grpo": "group_recipes",
        "gpg": "group_recipes",
        "grpo": "group_recipes",
        "grpo_pass_at_k": "group_recipes",
        "max_rl": "group_recipes",
        "opo": "group_recipes",
        "reinforce_plus_plus_baseline": "group_recipes",
        "rloo": "group_recipes",
        "importance_weights": "importance_weights",
        "kl_penalty": "kl_penalty",
        "loss_denominator": "loss_weights",
        "loss_weights": "loss_weights",
        "masked_moments": "moments",
        "moment_sums": "moments",
        "overlong_penalty": "reward_shaping",
        "pad": "pad",
        "policy_age": "staleness",
        "segment_max": "segment_reduce",
        "segment_mean": "segment_reduce",
        "segment_sum": "segment_reduce",
        "staleness_mask": "staleness",
        "staleness_weights": "staleness",
        "step_advantages": "step_groups",
        "td_lambda": "td_lambda",
        "turn_gae": "turn_gae",
        "unpad": "unpad",
        "vtrace": "vtrace",
        "whiten": "whiten",
        "context_parallel_index": "context_parallel",
        "context_parallel_order": "context_parallel",
        "merge_tokens": "merge_tokens",
        "select_tokens": "select_tokens",
        "shift_tokens": "shift",
        "drop_tokens": "shift",
    },
)
_PACKING = {
    "Alignment": "alignment",
    "DamagedLogError": "log_options",
    "DrGRPO": "group_estimators",
    "GAE": "estimators",
    "GPG": "group_estimators",
    "GRPO": "group_estimators",
    "GiGPO": "group_estimators",
    "KLPenalty": "estimators",
    "LogInUseError": "log_options",
    "LogOptions": "log_options",
    "LoggedEpisode": "trajectory_log",
    "MaxRL": "group_estimators",
    "MicroBatch": "micro_batch",
    "OPO": "group_estimators",
    "PackedBatch": "batch",
    "PassAtK": "group_estimators",
    "Plan": "plan",
    "RLOO": "group_estimators",
    "RankPlan": "plan_ranks",
    "ReinforcePlusPlus": "estimators",
    "ReinforcePlusPlusBaseline": "group_estimators",
    "StaticBatch": "static_batch",
    "TokenField": "token_fields",
    "Trajectory": "types",
    "TrajectoryBuffer": "buffer",
    "TrajectoryLog": "trajectory_log",
    "TransformerCost": "plan_costs",
    "Turn": "types",
    "TurnGAE": "estimators",
    "TurnReturns": "estimators",
    "VTrace": "estimators",
    "VersionSpan": "types",
    "pack": "buffer",
    "pack_resident": "resident",
    "plan_micro_batches": "plan",
    "plan_ranks": "plan_ranks",
    "unpack": "unpack",
}
_export(trajpack.packing, _PACKING)
_export(
    trajpack.agent,
    {
        "Agent": "protocols",
        "BackOff": "rollout_policy",
        "CodeEnvironment": "code_environment",
        "CodeProblem": "code_cases",
        "ConversationLimits": "chat_agent",
        "Engine": "protocols",
        "EngineEndedError": "errors",
        "Environment": "protocols",
        "EnvironmentAgent": "environment_agent",
        "EnvironmentFailedError": "errors",
        "EpisodeCancelledError": "errors",
        "EpisodeError": "errors",
        "EpisodeResult": "runner",
        "EpisodeTimeoutError": "errors",
        "ExactAnswerEnvironment": "exact_answers",
        "GenerationError": "errors",
        "GenerationOutput": "protocols",
        "GroupPolicy": "rollout_policy",
        "GroupResult": "runner",
        "GymnasiumEnvironment": "gymnasium_environment",
        "InputCase": "code_cases",
        "MalformedResponseError": "errors",
        "MathMultiTurnAgent": "math_multi_turn",
        "MathVerifyEnvironment": "math_verify_environment",
        "MetricsServer": "metrics_server",
        "PolicyTrainer": "policy_trainer",
        "Progress": "runner",
        "Prompt": "protocols",
        "Question": "questions",
        "RequestRefusedError": "errors",
        "RetryLimits": "servers.options",
        "RetryPolicy": "rollout_policy",
        "RolloutMetrics": "metrics",
        "RolloutObserver": "observers",
        "RolloutPolicy": "rollout_policy",
        "RolloutRunner": "runner",
        "RolloutTracer": "tracing",
        "SGLangEngine": "servers.sglang",
        "SamplingParams": "protocols",
        "Sandbox": "sandbox",
        "SandboxLimits": "sandbox_limits",
        "ServerOptions": "servers.options",
        "ServerSettings": "servers.settings",
        "ServerUnavailableError": "errors",
        "StaleEpisodeError": "errors",
        "StalenessPolicy": "rollout_policy",
        "TRLRollout": "trl_rollout",
        "TimeLimits": "servers.options",
        "Tool": "tools",
        "ToolAgent": "tool_agent",
        "TransformersEngine": "transformers_engine",
        "VLLMEngine": "servers.vllm",
        "ValueCase": "code_cases",
        "build_tiny_model": "tiny_model",
        "derive_seed": "seeding",
        "episode_reward": "trl_rollout",
        "load_questions": "questions",
        "make_agent": "registry",
        "not_all_equal": "group_filters",
        "reasoning_gym_questions": "questions",
        "register_agent": "registry",
        "serve_metrics": "metrics_server",
        "success_rate_between": "group_filters",
        "token_logprobs": "policy_trainer",
        "trl_dataset_rows": "trl_prompts",
        "watch_pack": "pack_watch",
    },
)
_export(
    _sys.modules[__name__],
    {name: f"packing.{module}" for name, module in _PACKING.items()}
    | {"Correction": "kernels.importance_rules", "Rejection": "kernels.importance_rules"},
)
