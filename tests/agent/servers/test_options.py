"""Options of engines that use servers: wrong values are named."""

import numpy as np
import pytest

from tests.agent.servers.loopback import options
from trajpack.agent.servers.options import RetryLimits, TimeLimits


def test_the_limits_say_what_is_wrong_with_them() -> None:
    for make, reason in (
        (lambda: TimeLimits(request_s=0), "request_s must be above 0, got 0"),
        (lambda: RetryLimits(max_attempts=0), "max_attempts must be above 0, got 0"),
        (lambda: options(vocab_size=0), "vocab_size must be above 0, got 0"),
        (lambda: options(logprobs="cooked"), "logprobs must be 'raw' or"),
        (lambda: options(token="a\nb"), "token must be printable"),
        (lambda: options(missing_logprobs="one"), "missing_logprobs must be one of"),
        (lambda: options(routed_experts=(2, 0)), "routed_experts must be"),
        (lambda: TimeLimits(request_s=float("nan")), "request_s must be above 0, got nan"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()
    for make, reason in (
        (lambda: TimeLimits(request_s="5"), "request_s must be a number, got str"),
        (lambda: RetryLimits(max_attempts=2.5), "max_attempts must be an integer, got float"),
        (lambda: options(max_connections=True), "max_connections must be an integer, got bool"),
        (lambda: options(seed=0.5), "seed must be an integer, got float"),
        (lambda: TimeLimits(start_s=None), "start_s must be a number, got NoneType"),
        (lambda: RetryLimits(max_attempts=None), "max_attempts must be an integer, got NoneType"),
        (lambda: options(max_connections=None), "max_connections must be an integer, got NoneType"),
    ):
        with pytest.raises(TypeError, match=reason):
            make()
    assert options(vocab_size=None, max_request_tokens=None).vocab_size is None
    assert options(vocab_size=np.int64(9), seed=np.int32(3)).vocab_size == 9
