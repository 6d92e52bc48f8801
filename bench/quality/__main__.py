"""`python -m bench.quality`."""

from bench.quality.measure import main

main()
