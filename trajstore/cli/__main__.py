"""``python -m trajstore.cli``: the command line."""

import sys

from trajstore.cli import main

sys.exit(main())
