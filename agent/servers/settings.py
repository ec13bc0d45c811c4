"""Settings of servers from the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.client import ServerURL
from trajpack.agent.servers.engine import ServerEngine
from trajpack.agent.servers.options import LogprobSemantics, ServerOptions, TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.optional import require

PREFIX = "TRAJPACK_SERVER_"
"""Prefix of the environment variables."""


@dataclass(frozen=True)
class ServerSettings:
    """Kind, addresses and options of servers.

    Addresses and the token are in no ``repr`` and no message.

    Attributes:
        kind: Kind of the servers.
        urls: Addresses of the servers.
        options: Limits, retries, the token.

    Example:
        >>> import os
        >>> os.environ["TRAJPACK_SERVER_URLS"] = "http://a:1,http://b:2"
        >>> os.environ["TRAJPACK_SERVER_TOKEN"] = "secret"
        >>> settings = ServerSettings.from_environment(seed=7)
        >>> settings
        ServerSettings(kind='vllm', names=('a:1', 'b:2'))
        >>> settings.options.seed, settings.make_engine().version
        (7, 0)
        >>> del os.environ["TRAJPACK_SERVER_URLS"], os.environ["TRAJPACK_SERVER_TOKEN"]
    """

    kind: Literal["vllm", "sglang"]
    urls: tuple[str, ...]
    options: ServerOptions

    def __repr__(self) -> str:
        return f"ServerSettings(kind={self.kind!r}, names={self.names})"

    @property
    def names(self) -> tuple[str, ...]:
        """Host and port of each server."""
        return tuple(ServerURL.parse(url).name for url in self.urls)

    @classmethod
    def from_environment(cls, urls: Sequence[str] = (), **options: Any) -> ServerSettings:
        """Read the variables that begin with ``TRAJPACK_SERVER_``.

        ``URLS`` (addresses separated by commas), ``KIND`` (``vllm`` or ``sglang``),
        ``TOKEN``, ``CA_FILE``, ``MAX_CONNECTIONS``, ``VOCAB_SIZE``, ``MAX_REQUEST_TOKENS``,
        ``LOGPROBS``, ``ALLOW_OTHER_LOGPROBS``, ``SEED``, and the times in seconds ``CONNECT_S``,
        ``REQUEST_S``, ``GENERATION_S``, ``OUTAGE_S``, ``START_S``, ``CONTROL_S``.

        Args:
            urls: Addresses that replace ``URLS``.
            options: Fields of `ServerOptions` that override the environment, ``time_limits`` all
                of its times.

        Raises:
            SetupError: If there is no address, or a value is invalid. The message names the
                variable and does not repeat its value.
        """
        require("pydantic", "pydantic_settings")
        from pydantic import ValidationError

        try:
            found = _settings_class()().model_dump(exclude_none=True)
        except ValidationError as error:
            problems = "; ".join(
                f"{PREFIX}{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}"
                for one in error.errors(include_input=False, include_url=False)
            )
            raise SetupError(f"the environment's server settings are wrong: {problems}") from None
        listed = (url.strip() for url in found.pop("urls", "").split(","))
        addresses = tuple(urls) or tuple(filter(None, listed))
        kind = found.pop("kind")
        if not addresses:
            raise SetupError(f"no server is named: give addresses, or set {PREFIX}URLS to them")
        times = {name: found.pop(name) for name in vars(TimeLimits()) if name in found}
        options.setdefault("time_limits", TimeLimits(**times))
        if "token" in found:
            found["token"] = found["token"].get_secret_value()
        try:
            for address in addresses:
                ServerURL.parse(address)
            return cls(kind, addresses, ServerOptions(**{**found, **options}))
        except ValueError as error:
            raise SetupError(f"the server settings are wrong: {error}") from None

    def make_engine(self, version: int = 0) -> ServerEngine:
        """Return an engine for these servers, not yet entered."""
        engine = VLLMEngine if self.kind == "vllm" else SGLangEngine
        return engine(self.urls, options=self.options, version=version)


@cache
def _settings_class() -> Any:
    """Return the pydantic class of the settings; its package is optional."""
    from pydantic import Field, SecretStr, create_model
    from pydantic_settings import BaseSettings, SettingsConfigDict

    class Prefixed(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True
        )

    positive = Annotated[float, Field(gt=0)]
    count = Annotated[int, Field(gt=0)]
    kinds: dict[str, Any] = {
        "urls": str,
        "token": SecretStr,
        "ca_file": str,
        "max_connections": count,
        "vocab_size": count,
        "max_request_tokens": count,
        "logprobs": LogprobSemantics | Literal["detect"],
        "allow_other_logprobs": bool,
        "seed": int,
        **dict.fromkeys(vars(TimeLimits()), positive),
    }
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in kinds.items()}
    fields["kind"] = (Literal["vllm", "sglang"], "vllm")
    return create_model("Environment", __base__=Prefixed, **fields)
