"""`python -m rmdm` is the command line."""

import sys

from rmdm.cli import main

if __name__ == "__main__":
    sys.exit(main())
