"""The store process: gRPC and HTTP around the state machine. Converts messages, maps errors, keeps time."""
