"""How the side-by-side comparison drives one system: a line in is one round, a line out its figures as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable


def serve(one_round: Callable[[], dict[str, float]]) -> None:
    """Answers each line of standard input with the figures of one round, until it ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    one_round()  # the first one pays for what is made on first use
    print("ready", file=answers, flush=True)
    for _line in sys.stdin:
        print(json.dumps(one_round()), file=answers, flush=True)
