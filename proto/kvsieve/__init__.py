"""The control protocol, generated from the .proto files beside it."""
