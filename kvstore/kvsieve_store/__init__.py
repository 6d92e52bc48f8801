"""kvsieve's store process, its client library and the admin CLI."""

from importlib.metadata import version

__version__ = version("kvsieve")
