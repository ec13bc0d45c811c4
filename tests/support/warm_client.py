"""Stands for a program that a warm process forks: hands over streams, folder and arguments."""

import array
import os
import resource
import signal
import socket
import sys

ADDRESS = PROGRAM = ""


def main() -> int:
    """Have the program run, and return the status of this process."""
    open_streams = []
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            continue
        open_streams.append(stream)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(ADDRESS)
    parts = [PROGRAM, os.getcwd(), "".join(map(str, open_streams)), *sys.argv[1:]]
    handed_over = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", open_streams))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: connection.send(str(number).encode()))
    connection.sendmsg(["\0".join(parts).encode()], [handed_over] if open_streams else [])
    # The streams stay open here: a reader sees their end when this ends, as the program did.
    status = int(connection.recv(16) or b"1")
    if status < 0:  # a signal ended the program: end by the same
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    os._exit(main())
