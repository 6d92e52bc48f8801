"""`python -m bench.traces`."""

from bench.traces.measure import main

if __name__ == "__main__":
    main()
