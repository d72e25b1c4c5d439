"""`python -m zbsolve.cli`."""

import sys

from .app import main

sys.exit(main())
