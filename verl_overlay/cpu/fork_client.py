"""fork_client.py SOCKET PYTHON ARGS…: what Ray runs in place of `python ARGS…` while the fast start is on.

Asks the fork server for a ready worker when ARGS start a Ray worker; anything else is handed to PYTHON. Run
as a script with -IS, so it imports next to nothing and starts in a few milliseconds.
"""

import array
import json
import os
import socket
import sys

WORKER_SCRIPT = "setup_worker.py"


def ask_for_worker(path: str, argv: list[str]) -> int:
    """Send arguments, environment, folder and standard streams; the server answers "1" once it has forked."""
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode() + b"\0"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        streams = array.array("i", [0, 1, 2])
        sent = connection.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        if sent < len(request):  # an empty send would fail once the server has answered and hung up
            connection.sendall(request[sent:])
        return 0 if connection.recv(1) == b"1" else 1


def main() -> None:
    path, python, argv = sys.argv[1], sys.argv[2], sys.argv[3:]
    if argv and os.path.basename(argv[0]) == WORKER_SCRIPT:
        os._exit(ask_for_worker(path, argv))
    os.execv(python, [python, *argv])


if __name__ == "__main__":
    main()
