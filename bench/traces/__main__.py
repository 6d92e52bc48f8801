"""`python -m bench.traces`."""

from bench.traces.measure import main

main()
