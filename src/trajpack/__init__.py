"""Turns of LLM agents, packed into training batches on the device."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

import trajpack.agent
import trajpack.kernels
import trajpack.packing
from trajpack.packing.batch import PackedBatch
from trajpack.packing.buffer import TrajectoryBuffer, pack
from trajpack.packing.resident import pack_resident
from trajpack.packing.static_batch import StaticBatch
from trajpack.packing.token_fields import TokenField
from trajpack.packing.types import Trajectory, Turn, VersionSpan
from trajpack.packing.unpack import unpack

__all__ = [
    "PackedBatch",
    "StaticBatch",
    "TokenField",
    "Trajectory",
    "TrajectoryBuffer",
    "Turn",
    "VersionSpan",
    "pack",
    "pack_resident",
    "unpack",
]


def _export(layer: _ModuleType, names: dict[str, str]) -> None:
    """Let a layer, which has no ``__init__`` of its own, hand out names of its modules."""

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {layer.__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{layer.__name__}.{names[name]}"), name)

    layer.__dict__.update(__all__=sorted(names), __getattr__=get)
    # an op has its module's name, and the module, once imported, stands in its place
    layer.__dict__.update((name, get(name)) for name, module in names.items() if name == module)


_export(
    trajpack.kernels,
    {
        "build": "build",
        "discounted_returns": "discounted_returns",
        "gather_words": "gather_words",
        "pad": "pad",
        "unpad": "unpad",
    },
)
_export(
    trajpack.packing,
    {
        "PackedBatch": "batch",
        "StaticBatch": "static_batch",
        "TokenField": "token_fields",
        "Trajectory": "types",
        "TrajectoryBuffer": "buffer",
        "Turn": "types",
        "VersionSpan": "types",
        "pack": "buffer",
        "pack_resident": "resident",
        "unpack": "unpack",
    },
)
_export(
    trajpack.agent,
    {
        "Agent": "protocols",
        "Engine": "protocols",
        "Environment": "protocols",
        "EpisodeError": "errors",
        "EpisodeResult": "runner",
        "GenerationError": "errors",
        "GenerationOutput": "protocols",
        "MathMultiTurnAgent": "math_multi_turn",
        "MathVerifyEnvironment": "math_verify_environment",
        "Progress": "runner",
        "Prompt": "protocols",
        "Question": "questions",
        "RolloutRunner": "runner",
        "SamplingParams": "protocols",
        "TransformersEngine": "transformers_engine",
        "build_tiny_model": "tiny_model",
        "load_questions": "questions",
        "make_agent": "registry",
        "reasoning_gym_questions": "questions",
        "register_agent": "registry",
    },
)
