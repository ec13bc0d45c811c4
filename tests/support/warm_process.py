"""Imports what programs of trajpack import, then forks into one for each request."""

import array
import gc
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path


def preload():
    """Import what a rollout and a judge of answers import, and start no thread."""
    import math_verify  # noqa: F401
    import reasoning_gym  # noqa: F401
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: F401

    import trajpack.agent.rollout.rollout
    import trajpack.cli
    import trajpack.commands.app
    import trajpack.commands.inspect
    import trajpack.commands.rollout  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is here is shared by all that is forked


def serve(path):
    """Wait for requests; return the program and its arguments, in a fork of this process."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)
    holders = set()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        for ready in select.select([listening, *holders], [], [])[0]:
            if ready is not listening:
                holders.discard(ready)  # it sends nothing: this is its end
                ready.close()
                continue
            connection, _ = listening.accept()
            message, ancillary, *_ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(12))
            if message == b"hold":
                holders.add(connection)
                continue
            streams = array.array("i")
            for *_, packed in ancillary:
                streams.frombytes(packed)
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listening, *holders):
                    other.close()
                return become(connection, message.decode().split("\0"), streams)
            connection.close()
            for stream in streams:
                os.close(stream)
        if not holders:
            os.unlink(path)
            os._exit(0)


def become(connection, parts, streams):
    """Return in the program, a fork again; this process waits for it, or for the one who asks."""
    name, folder, places, *arguments = parts
    program = os.fork()
    if program:
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(program)
        while ended not in select.select([connection, ended], [], [])[0]:
            number = connection.recv(16)  # nothing, if the one who asked was killed
            os.kill(program, int(number or signal.SIGKILL))
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        with suppress(OSError):
            connection.send(str(status).encode())
        os._exit(0)
    connection.close()
    os.chdir(folder)
    for place, standard in enumerate(("stdin", "stdout", "stderr")):
        stream = None  # as an interpreter has it that starts where it is closed
        if str(place) in places:
            os.dup2(streams[places.index(str(place))], place)
            stream = standard_stream(place)
        else:
            os.close(place)
        setattr(sys, standard, stream)
        setattr(sys, f"__{standard}__", stream)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return name, arguments


def standard_stream(place):
    """Return what an interpreter makes of a stream when it starts."""
    if place == 0:
        return open(place, closefd=False)
    errors, buffering = ("strict", -1) if place == 1 else ("backslashreplace", 1)
    return open(place, "w", buffering, errors=errors, newline="\n", closefd=False)


if __name__ == "__main__":
    address, scripts = sys.argv[1:]
    if os.fork():
        os._exit(0)  # whoever started this need not wait for its end
    preload()
    program, options = serve(address)
    import trajpack.cli
    from trajpack.agent.environments import answer_worker, math_verify

    if program == "judge":
        answer_worker.main("gym" in options)
        os._exit(0)
    math_verify.SCRIPT = Path(scripts, "judge.py")
    if program == "script":
        warnings.simplefilter("error")
        sys.argv = options
        runpy.run_path(options[0], run_name="__main__")
    else:
        sys.argv = [program, *options]
        trajpack.cli.main()
