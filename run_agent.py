"""The command: `python run_agent.py [run|resume|export|status|report] …`; see README.md."""

import sys

from agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
