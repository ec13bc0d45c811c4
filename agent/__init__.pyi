"""What `trajpack.agent` exports, for type checkers; `trajpack` itself makes it so."""

from trajpack.agent.errors import EpisodeError as EpisodeError
from trajpack.agent.errors import GenerationError as GenerationError
from trajpack.agent.exact_answers import ExactAnswerEnvironment as ExactAnswerEnvironment
from trajpack.agent.math_multi_turn import MathMultiTurnAgent as MathMultiTurnAgent
from trajpack.agent.math_verify_environment import MathVerifyEnvironment as MathVerifyEnvironment
from trajpack.agent.policy_trainer import PolicyTrainer as PolicyTrainer
from trajpack.agent.policy_trainer import token_logprobs as token_logprobs
from trajpack.agent.protocols import Agent as Agent
from trajpack.agent.protocols import Engine as Engine
from trajpack.agent.protocols import Environment as Environment
from trajpack.agent.protocols import GenerationOutput as GenerationOutput
from trajpack.agent.protocols import Prompt as Prompt
from trajpack.agent.protocols import SamplingParams as SamplingParams
from trajpack.agent.questions import Question as Question
from trajpack.agent.questions import load_questions as load_questions
from trajpack.agent.questions import reasoning_gym_questions as reasoning_gym_questions
from trajpack.agent.registry import make_agent as make_agent
from trajpack.agent.registry import register_agent as register_agent
from trajpack.agent.runner import EpisodeResult as EpisodeResult
from trajpack.agent.runner import Progress as Progress
from trajpack.agent.runner import RolloutRunner as RolloutRunner
from trajpack.agent.tiny_model import build_tiny_model as build_tiny_model
from trajpack.agent.transformers_engine import TransformersEngine as TransformersEngine
from trajpack.agent.trl_prompts import trl_dataset_rows as trl_dataset_rows
from trajpack.agent.trl_rollout import TRLRollout as TRLRollout
from trajpack.agent.trl_rollout import episode_reward as episode_reward
