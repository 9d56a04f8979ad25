"""`python -m hookkit module:factory --input 1,3,224,224`, or `python -m hookkit compare a b`.

See `hookkit.summaries.cli` and `hookkit.comparing.cli`.
"""

import sys

from hookkit.comparing import cli as comparing
from hookkit.summaries import cli as summaries

if __name__ == "__main__":
    compares = sys.argv[1:2] == ["compare"]
    raise SystemExit(comparing.main(sys.argv[2:]) if compares else summaries.main())
