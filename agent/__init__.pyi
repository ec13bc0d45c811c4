"""Names that `trajpack.agent` exports. The runtime reads this list too."""

from trajpack.agent.agents.conversation import ConversationLimits as ConversationLimits
from trajpack.agent.agents.environment_agent import EnvironmentAgent as EnvironmentAgent
from trajpack.agent.agents.episode_agent import EpisodeAgent as EpisodeAgent
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent as MathMultiTurnAgent
from trajpack.agent.agents.tool_agent import ToolAgent as ToolAgent
from trajpack.agent.agents.tools import Tool as Tool
from trajpack.agent.conversation_rows import (
    conversations_to_trajectories as conversations_to_trajectories,
)
from trajpack.agent.engines.function_engine import FunctionEngine as FunctionEngine
from trajpack.agent.engines.transformers_engine import TransformersEngine as TransformersEngine
from trajpack.agent.environments.code import CodeEnvironment as CodeEnvironment
from trajpack.agent.environments.gymnasium import GymnasiumEnvironment as GymnasiumEnvironment
from trajpack.agent.environments.math_verify import MathVerifyEnvironment as MathVerifyEnvironment
from trajpack.agent.environments.program_runner import BubblewrapRunner as BubblewrapRunner
from trajpack.agent.environments.questions import (
    ExactAnswerEnvironment as ExactAnswerEnvironment,
    Question as Question,
)
from trajpack.agent.errors import (
    EpisodeError as EpisodeError,
    GenerationError as GenerationError,
    RequestRefusedError as RequestRefusedError,
)
from trajpack.agent.models.tiny_model import build_tiny_model as build_tiny_model
from trajpack.agent.observability.metrics import RolloutMetrics as RolloutMetrics
from trajpack.agent.observability.tracing import RolloutTracer as RolloutTracer
from trajpack.agent.protocols import (
    Agent as Agent,
    Engine as Engine,
    Environment as Environment,
    GenerationOutput as GenerationOutput,
    Prompt as Prompt,
    SamplingParams as SamplingParams,
)
from trajpack.agent.runner.observers import RolloutObserver as RolloutObserver
from trajpack.agent.runner.policy import (
    GroupPolicy as GroupPolicy,
    RetryPolicy as RetryPolicy,
    RolloutPolicy as RolloutPolicy,
    StalenessPolicy as StalenessPolicy,
)
from trajpack.agent.runner.runner import (
    EpisodeResult as EpisodeResult,
    RolloutRunner as RolloutRunner,
)
from trajpack.agent.servers.options import ServerOptions as ServerOptions
from trajpack.agent.servers.sglang import SGLangEngine as SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine as VLLMEngine
from trajpack.agent.trl.rollout import (
    TRLRollout as TRLRollout,
    episode_reward as episode_reward,
    trl_dataset_rows as trl_dataset_rows,
)
