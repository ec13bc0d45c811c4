"""Settings from the environment: what they say, and what they never show."""

import asyncio
import pickle

import numpy as np
import pytest

from tests.agent.servers.loopback import Loopback, generate, options, say_sglang
from trajpack.agent.errors import SetupError
from trajpack.agent.servers.options import RetryLimits, TimeLimits
from trajpack.agent.servers.settings import PREFIX, ServerSettings
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith(PREFIX)]:
        monkeypatch.delenv(name)


def put(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(PREFIX + name, value)


def test_everything_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    put(
        monkeypatch,
        URLS=" http://me:pass@a:1/x/ , https://b ,",
        KIND="sglang",
        TOKEN="s3cret",
        MAX_CONNECTIONS="9",
        VOCAB_SIZE="100",
        LOGPROBS="detect",
        SEED="7",
        CONNECT_S="1.5",
        START_S="3",
    )
    settings = ServerSettings.from_environment()
    assert settings.urls == ("http://me:pass@a:1/x/", "https://b")
    assert settings.names == ("a:1", "b")
    assert settings.options.token == "s3cret"
    assert settings.options.time_limits == TimeLimits(connect_s=1.5, start_s=3)
    given = settings.options
    assert (given.max_connections, given.vocab_size, given.seed) == (9, 100, 7)
    assert (given.logprobs, given.allow_other_logprobs) == ("detect", False)
    engine = settings.make_engine(version=4)
    assert isinstance(engine, SGLangEngine)
    assert engine.version == 4
    for shown in (repr(settings), str(settings), repr(given), repr(engine._urls), repr(engine)):
        assert "s3cret" not in shown
        assert "pass" not in shown
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, URLS="http://a", SEED="7", VOCAB_SIZE="5")
    settings = ServerSettings.from_environment(["http://c:3"], seed=8, max_connections=2)
    assert settings.names == ("c:3",)
    assert isinstance(settings.make_engine(), VLLMEngine)
    given = settings.options
    assert (given.seed, given.vocab_size, given.max_connections) == (8, 5, 2)


def test_time_limits_that_are_given_are_not_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(monkeypatch, URLS="http://a", START_S="7")
    given = TimeLimits(start_s=1)
    assert ServerSettings.from_environment(time_limits=given).options.time_limits is given
    assert ServerSettings.from_environment().options.time_limits == TimeLimits(start_s=7)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, f"set {PREFIX}URLS"),
        ({"URLS": ","}, f"set {PREFIX}URLS"),
        ({"URLS": "sekret://x"}, "a server's address must be http://"),
        ({"URLS": "http://me:sekret@"}, "a server's address must be http://"),
        ({"URLS": "http://a", "KIND": "sekret"}, f"{PREFIX}KIND: Input should be 'vllm' or"),
        ({"URLS": "http://a", "SEED": "sekret"}, f"{PREFIX}SEED: Input should be a valid integer"),
        ({"URLS": "http://a", "CONNECT_S": "-1"}, f"{PREFIX}CONNECT_S: Input should be greater"),
        ({"URLS": "http://a", "TOKEN": "sekret\n"}, "token must be printable"),
        ({"URLS": "http://a", "LOGPROBS": "sekret"}, f"{PREFIX}LOGPROBS"),
    ],
)
def test_wrong_settings_are_named_and_not_repeated(
    values: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, **values)
    with pytest.raises(SetupError) as caught:
        ServerSettings.from_environment()
    assert reason in str(caught.value)
    assert "sekret" not in str(caught.value)


def test_an_engine_made_of_settings_works(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with Loopback(say_sglang) as server:
            put(monkeypatch, URLS=server.url, KIND="sglang", TOKEN="s3cret")
            async with ServerSettings.from_environment().make_engine() as engine:
                await generate(engine)
            assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer s3cret"}

    asyncio.run(body())


def test_the_limits_say_what_is_wrong_with_them() -> None:
    for make, reason in (
        (lambda: TimeLimits(connect_s=0), "connect_s must be above 0, got 0"),
        (lambda: RetryLimits(max_attempts=0), "max_attempts must be above 0, got 0"),
        (lambda: options(vocab_size=0), "vocab_size must be above 0, got 0"),
        (lambda: options(logprobs="cooked"), "logprobs must be 'raw'"),
        (lambda: options(token="a\nb"), "token must be printable"),
        (lambda: TimeLimits(connect_s=float("nan")), "connect_s must be above 0, got nan"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()
    for make, reason in (
        (lambda: TimeLimits(connect_s="5"), "connect_s must be a number, got str"),
        (lambda: RetryLimits(max_attempts=2.5), "max_attempts must be an integer, got float"),
        (lambda: options(max_connections=True), "max_connections must be an integer, got bool"),
        (lambda: options(token=b"abc"), "token must be a string, got bytes"),
        (lambda: options(seed=0.5), "seed must be an integer, got float"),
    ):
        with pytest.raises(TypeError, match=reason):
            make()
    assert options(vocab_size=np.int64(9), seed=np.int32(3)).vocab_size == 9
