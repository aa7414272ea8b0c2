"""ray_head.py ADDRESS_FILE PYTHON OPTIONS: the Ray head that ray.init() would start, until stdin is closed.

Run as a script in a process of its own while the driver is still importing. Writes the head's address to
ADDRESS_FILE; PYTHON is the command that Ray's workers are started with; OPTIONS are RayParams as JSON.
"""

import json
import os
import sys


def main() -> None:
    address_file, python, options = sys.argv[1:4]
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    sys.executable = python  # ray/_private/services.py builds the worker command from it
    node = Node(RayParams(**json.loads(options)), head=True, shutdown_at_exit=False)
    try:
        with open(address_file + ".part", "w", encoding="utf-8") as out:
            out.write(node.gcs_address)
        os.rename(address_file + ".part", address_file)
        sys.stdin.read()
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main()
