"""``python -m sglang_jitfix``: the same as the ``sglang-jitfix`` command."""

import sys

from sglang_jitfix.cli.main import main

sys.exit(main())
