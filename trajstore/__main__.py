"""``python -m trajstore``: the command line."""

import sys

from trajstore.cli import main

sys.exit(main())
