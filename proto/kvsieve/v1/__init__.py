"""Version 1 of the control protocol."""
