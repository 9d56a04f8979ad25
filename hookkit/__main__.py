"""`python -m hookkit module:factory --input 1,3,224,224`. See `hookkit.summaries.cli`."""

from hookkit.summaries.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
