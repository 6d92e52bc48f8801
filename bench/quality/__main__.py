"""`python -m bench.quality`."""

from bench.quality.measure import main

if __name__ == "__main__":
    main()
