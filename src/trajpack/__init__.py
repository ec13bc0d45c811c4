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
        "Correction": "corrections.importance_rules",
        "Rejection": "corrections.importance_rules",
        "build": "fields.build",
        "discounted_returns": "credit.discounted_returns",
        "gae": "credit.gae",
        "gather_words": "fields.gather_words",
        "group_advantages": "groups.group_advantages",
        "dr_grpo": "groups.group_recipes",
        "gpg": "groups.group_recipes",
        "grpo": "groups.group_recipes",
        "grpo_pass_at_k": "groups.group_recipes",
        "max_rl": "groups.group_recipes",
        "opo": "groups.group_recipes",
        "reinforce_plus_plus_baseline": "groups.group_recipes",
        "rloo": "groups.group_recipes",
        "importance_weights": "corrections.importance_weights",
        "kl_penalty": "corrections.kl_penalty",
        "loss_denominator": "corrections.loss_weights",
        "loss_weights": "corrections.loss_weights",
        "masked_moments": "reduce.moments",
        "moment_sums": "reduce.moments",
        "overlong_penalty": "corrections.reward_shaping",
        "pad": "rearrange.pad",
        "policy_age": "corrections.staleness",
        "segment_max": "reduce.segment_reduce",
        "segment_mean": "reduce.segment_reduce",
        "segment_sum": "reduce.segment_reduce",
        "staleness_mask": "corrections.staleness",
        "staleness_weights": "corrections.staleness",
        "step_advantages": "groups.step_groups",
        "td_lambda": "credit.td_lambda",
        "turn_gae": "credit.turn_gae",
        "unpad": "rearrange.unpad",
        "vtrace": "credit.vtrace",
        "whiten": "reduce.whiten",
        "context_parallel_index": "rearrange.context_parallel",
        "context_parallel_order": "rearrange.context_parallel",
        "merge_tokens": "rearrange.merge_tokens",
        "select_tokens": "rearrange.select_tokens",
        "shift_tokens": "rearrange.shift",
        "drop_tokens": "rearrange.shift",
    },
)
_PACKING = {
    "Alignment": "micro_batches.alignment",
    "DamagedLogError": "trajectory_log.options",
    "DrGRPO": "credit.group_estimators",
    "GAE": "credit.estimators",
    "GPG": "credit.group_estimators",
    "GRPO": "credit.group_estimators",
    "GiGPO": "credit.group_estimators",
    "KLPenalty": "credit.estimators",
    "LogInUseError": "trajectory_log.options",
    "LogOptions": "trajectory_log.options",
    "LoggedEpisode": "trajectory_log.log",
    "MaxRL": "credit.group_estimators",
    "MicroBatch": "micro_batches.micro_batch",
    "OPO": "credit.group_estimators",
    "PackedBatch": "batch.batch",
    "PassAtK": "credit.group_estimators",
    "Plan": "plan.plan",
    "RLOO": "credit.group_estimators",
    "RankPlan": "plan.ranks",
    "ReinforcePlusPlus": "credit.estimators",
    "ReinforcePlusPlusBaseline": "credit.group_estimators",
    "StaticBatch": "buffer.static_batch",
    "TokenField": "token_fields",
    "Trajectory": "types",
    "TrajectoryBuffer": "buffer.buffer",
    "TrajectoryLog": "trajectory_log.log",
    "TransformerCost": "plan.costs",
    "Turn": "types",
    "TurnGAE": "credit.estimators",
    "TurnReturns": "credit.estimators",
    "VTrace": "credit.estimators",
    "VersionSpan": "types",
    "pack": "buffer.buffer",
    "pack_resident": "buffer.resident",
    "plan_micro_batches": "plan.plan",
    "plan_ranks": "plan.ranks",
    "unpack": "batch.unpack",
}
_export(trajpack.packing, _PACKING)
_export(
    trajpack.agent,
    {
        "Agent": "protocols",
        "BackOff": "runner.policy",
        "CodeEnvironment": "environments.code",
        "CodeProblem": "environments.code_cases",
        "ConversationLimits": "agents.chat_agent",
        "Engine": "protocols",
        "EngineEndedError": "errors",
        "Environment": "protocols",
        "EnvironmentAgent": "agents.environment_agent",
        "EnvironmentFailedError": "errors",
        "EpisodeCancelledError": "errors",
        "EpisodeError": "errors",
        "EpisodeResult": "runner.runner",
        "EpisodeTimeoutError": "errors",
        "ExactAnswerEnvironment": "environments.exact_answers",
        "GenerationError": "errors",
        "GenerationOutput": "protocols",
        "GroupPolicy": "runner.policy",
        "GroupResult": "runner.runner",
        "GymnasiumEnvironment": "environments.gymnasium",
        "InputCase": "environments.code_cases",
        "MalformedResponseError": "errors",
        "MathMultiTurnAgent": "agents.math_multi_turn",
        "MathVerifyEnvironment": "environments.math_verify",
        "MetricsServer": "observability.server",
        "PolicyTrainer": "training.policy_trainer",
        "Progress": "runner.runner",
        "Prompt": "protocols",
        "Question": "environments.questions",
        "RequestRefusedError": "errors",
        "RetryLimits": "servers.options",
        "RetryPolicy": "runner.policy",
        "RolloutMetrics": "observability.metrics",
        "RolloutObserver": "runner.observers",
        "RolloutPolicy": "runner.policy",
        "RolloutRunner": "runner.runner",
        "RolloutTracer": "observability.tracing",
        "SGLangEngine": "servers.kinds.sglang",
        "SamplingParams": "protocols",
        "Sandbox": "sandbox.sandbox",
        "SandboxLimits": "sandbox.limits",
        "ServerOptions": "servers.options",
        "ServerSettings": "servers.kinds.settings",
        "ServerUnavailableError": "errors",
        "StaleEpisodeError": "errors",
        "StalenessPolicy": "runner.policy",
        "TRLRollout": "trl.rollout",
        "TimeLimits": "servers.options",
        "Tool": "agents.tools",
        "ToolAgent": "agents.tool_agent",
        "TransformersEngine": "engines.transformers_engine",
        "VLLMEngine": "servers.kinds.vllm",
        "ValueCase": "environments.code_cases",
        "build_tiny_model": "models.tiny_model",
        "derive_seed": "seeding",
        "episode_reward": "trl.rollout",
        "load_questions": "environments.questions",
        "make_agent": "agents.registry",
        "not_all_equal": "runner.filters",
        "reasoning_gym_questions": "environments.questions",
        "register_agent": "agents.registry",
        "serve_metrics": "observability.server",
        "success_rate_between": "runner.filters",
        "token_logprobs": "training.policy_trainer",
        "trl_dataset_rows": "trl.prompts",
        "watch_pack": "observability.pack_watch",
    },
)
_export(
    _sys.modules[__name__],
    {name: f"packing.{module}" for name, module in _PACKING.items()}
    | {"Correction": "kernels.importance_rules", "Rejection": "kernels.importance_rules"},
)
