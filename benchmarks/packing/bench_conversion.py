"""Every way from what an engine or an agent holds to int32 ids and float32 log-probabilities.

``make bench`` prints tokens per second of each; ``docs/conversions.md`` has them with their
machine. A way's result is checked bit for bit before it is timed. JSON is timed from the bytes of
a body to all of its arrays; a library that is not installed is skipped by name.
"""

import importlib
import json
import struct
import time
from array import array

import numpy as np
import pytest
import torch

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.engine_response import read_response
from trajpack.agent.servers.options import ServerOptions
from trajpack.packing.conversion import as_ids, as_logprobs

NUM_VALUES = 2**20
TURN = 4096
PIECE = 8192
NUM_PROMPT = 2000
VOCAB_SIZE = 151_936
REQUIRED_RATIO = 1.2


@pytest.fixture(scope="module")
def table(request):
    """Rows of ``(what, way, million tokens per second)``, printed when all are there."""
    rows = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n\nmillion tokens per second, best round")
        for what, way, rate in sorted(rows, key=lambda row: (row[0], -row[2])):
            print(f"  {what:28} {way:34} {rate:9.1f}")


def draw(num_tokens, dtype, seed=0):
    generator = np.random.default_rng(seed)
    if dtype == np.int32:
        return generator.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)
    return -generator.exponential(1.0, num_tokens).astype(np.float32)


def measure(benchmark, table, row, work, rounds=7):
    """Time ``work``; ``row`` is what is converted, the way, and the number of tokens."""
    what, way, num_tokens = row
    benchmark.pedantic(work, rounds=rounds, warmup_rounds=1)
    rate = num_tokens / benchmark.stats.stats.min / 1e6
    benchmark.extra_info.update(tokens=num_tokens, million_tokens_per_second=round(rate, 2))
    table.append((what, way, rate))


def packed_bytes(values, code):
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), np.dtype(code))


def packed_in_pieces(values, code):
    """Pack what fits the cache at a time."""
    packed = np.empty(len(values), code)
    for begin in range(0, len(values), PIECE):
        piece = values[begin : begin + PIECE]
        struct.pack_into(f"{len(piece)}{code}", packed, 4 * begin, *piece)
    return packed


def code_of(dtype):
    return np.dtype(dtype).char


def convert(values, dtype):
    return as_ids("ids", values) if dtype is np.int32 else as_logprobs("logprobs", values)


LIST_WAYS = {
    "array.array": lambda values, dtype: np.frombuffer(array(code_of(dtype), values), dtype),
    "numpy.array": np.array,
    "numpy.fromiter": lambda values, dtype: np.fromiter(values, dtype, len(values)),
    "struct.pack": lambda values, dtype: packed_bytes(values, code_of(dtype)),
    "struct.pack, in pieces": lambda values, dtype: packed_in_pieces(values, code_of(dtype)),
    "torch.tensor": lambda values, dtype: torch.tensor(
        values, dtype=torch.int32 if dtype is np.int32 else torch.float32
    ).numpy(),
    "trajpack": convert,
}


def check(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


def cut(values, length):
    """Return lists of one length: turns, or one long list."""
    return [values[begin : begin + length].tolist() for begin in range(0, values.size, length)]


@pytest.mark.parametrize("way", LIST_WAYS)
@pytest.mark.parametrize("length", [TURN, NUM_VALUES])
@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["ids", "logprobs"])
def bench_from_a_list(benchmark, table, dtype, length, way):
    expected, to_array = draw(NUM_VALUES, dtype), LIST_WAYS[way]
    lists = cut(expected, length)
    check([np.concatenate([to_array(values, dtype) for values in lists])], [expected])
    what = f"list of {length:,} {'ids' if dtype is np.int32 else 'logprobs'}"

    def convert_all():
        for values in lists:
            to_array(values, dtype)

    measure(benchmark, table, (what, way, NUM_VALUES), convert_all)


@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["ids", "logprobs"])
def bench_lists_take_little_more_than_the_fastest_way(benchmark, dtype):
    """Lists as long as a turn; every list by every way in turn, so that all are slowed alike."""
    lists = cut(draw(NUM_VALUES // 8, dtype), TURN)
    ratios = benchmark.pedantic(ratios_to_the_fastest, args=(lists, dtype), rounds=1)
    ratio = float(np.median(ratios))
    benchmark.extra_info["ratio"] = ratio
    assert ratio <= REQUIRED_RATIO, f"{ratio:.2f} times the time of the fastest way"


def ratios_to_the_fastest(lists, dtype, num_rounds=25):
    """Return, for each list, our best time over the best time of any other way."""
    ratios = []
    for values in lists:
        best = dict.fromkeys(LIST_WAYS, float("inf"))
        for _ in range(num_rounds):
            for way, to_array in LIST_WAYS.items():
                begin = time.perf_counter()
                to_array(values, dtype)
                best[way] = min(best[way], time.perf_counter() - begin)
        ratios.append(best.pop("trajpack") / min(best.values()))
    return ratios


CONTAINERS = {
    "numpy, same dtype": lambda values: values,
    "numpy, 64 bits": lambda values: values.astype(np.int64 if values.dtype == np.int32 else float),
    "torch, same dtype": torch.from_numpy,
    "torch, 64 bits": lambda values: (
        torch.from_numpy(values).long()
        if values.dtype == np.int32
        else torch.from_numpy(values).double()
    ),
    "array.array": lambda values: array(values.dtype.char, values.tobytes()),
    "tuple": lambda values: tuple(values.tolist()),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["ids", "logprobs"])
def bench_from_a_container(benchmark, table, dtype, container):
    expected = draw(NUM_VALUES, dtype)
    values = CONTAINERS[container](expected)
    check([convert(values, dtype)], [expected])
    what = f"trajpack, {'ids' if dtype is np.int32 else 'logprobs'} from"
    measure(benchmark, table, (what, container, NUM_VALUES), lambda: convert(values, dtype))


def body_of(shape, num_tokens):
    """Return a body as vLLM writes it and the arrays that are in it."""
    prompt = draw(NUM_PROMPT, np.int32, seed=1)
    ids, logprobs = draw(num_tokens, np.int32), draw(num_tokens, np.float32)
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids.tolist()}
    pairs = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    if shape == "generate":
        entries = [{"token_id": i, "logprob": v, "rank": 3} for i, v in pairs]
        choice["logprobs"] = {"content": [e | {"top_logprobs": [e]} for e in entries]}
        response, arrays = {"prompt_token_ids": None}, (ids, logprobs)
    else:
        tokens = [f" token{i % 1000}" for i in ids.tolist()]
        choice |= {"text": "".join(tokens), "prompt_token_ids": prompt.tolist()}
        choice["logprobs"] = {
            "text_offset": list(range(0, 8 * num_tokens, 8)),
            "token_logprobs": logprobs.tolist(),
            "tokens": tokens,
            "top_logprobs": [{t: v} for t, (_, v) in zip(tokens, pairs, strict=True)],
        }
        response, arrays = {"object": "text_completion"}, (prompt, ids, logprobs)
    return json.dumps(response | {"choices": [choice]}, separators=(",", ":")).encode(), arrays


def from_objects(response):
    choice = response["choices"][0]
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        values = [entry["logprob"] for entry in logprobs["content"]]
        return packed_bytes(choice["token_ids"], "i"), packed_bytes(values, "f")
    ids = [packed_bytes(choice[name], "i") for name in ("prompt_token_ids", "token_ids")]
    return *ids, packed_bytes(logprobs["token_logprobs"], "f")


def with_simdjson_buffers(simdjson, body):
    choice = simdjson.Parser().parse(body)["choices"][0]

    def ids(name):
        return np.frombuffer(choice[name].as_buffer(of_type="i"), np.int64).astype(np.int32)

    logprobs = choice["logprobs"]
    if "content" in logprobs:  # no buffer for members of objects
        return ids("token_ids"), packed_bytes([e["logprob"] for e in logprobs["content"]], "f")
    values = logprobs["token_logprobs"].as_buffer(of_type="d")
    return (
        ids("prompt_token_ids"),
        ids("token_ids"),
        np.frombuffer(values, np.float64).astype(np.float32),
    )


def by_hand(body, parse):
    """Find the arrays by their names; sound only while nobody nests or spaces them otherwise."""

    def between(name):
        begin = body.index(f'"{name}":['.encode()) + len(name) + 4
        return body[begin : body.index(b"]", begin)]

    ids = [parse(between(name), np.int32) for name in ("prompt_token_ids", "token_ids")]
    return *ids, parse(between("token_logprobs"), np.float64).astype(np.float32)


def with_trajpack(body):
    response = read_response(
        "vLLM", body, SamplingParams(2**20), options=ServerOptions(vocab_size=VOCAB_SIZE)
    )
    arrays = (response.prompt_ids, response.output_ids, response.output_logprobs)
    return tuple(part for part in arrays if part is not None)


JSON_WAYS = {
    "json": ("json", lambda json, body: from_objects(json.loads(body))),
    "orjson": ("orjson", lambda orjson, body: from_objects(orjson.loads(body))),
    "msgspec, untyped": ("msgspec", lambda msgspec, body: from_objects(msgspec.json.decode(body))),
    "pysimdjson, buffers": ("simdjson", with_simdjson_buffers),
    "find, numpy.fromstring": (
        "numpy",
        lambda numpy, body: by_hand(body, lambda s, d: numpy.fromstring(s.decode(), d, sep=",")),
    ),
    "find, split, numpy.array": (
        "numpy",
        lambda numpy, body: by_hand(body, lambda s, d: numpy.array(s.split(b",")).astype(d)),
    ),
    "trajpack": ("msgspec", lambda msgspec, body: with_trajpack(body)),
}


@pytest.mark.parametrize("way", JSON_WAYS)
@pytest.mark.parametrize("num_tokens", [4096, 32_768])
@pytest.mark.parametrize("shape", ["generate", "completions"])
def bench_from_json(benchmark, table, shape, num_tokens, way):
    library, read = JSON_WAYS[way]
    if way.startswith("find") and shape == "generate":
        pytest.skip("a log-probability in each object: there is no array to find")
    try:
        module = importlib.import_module(library)
    except ImportError:
        pytest.skip(f"{library} is not installed")
    body, arrays = body_of(shape, num_tokens)
    check(read(module, body), arrays)
    what = f"JSON, {shape}, {num_tokens:,}"
    total = sum(part.size for part in arrays) - num_tokens  # ids: a logprob makes no other token
    measure(benchmark, table, (what, way, total), lambda: read(module, body))
