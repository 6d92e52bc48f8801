"""Entry point `vllm.general_plugins`: makes "KVSieveConnector" known by name, without a module path."""

NAME = "KVSieveConnector"
MODULE = "kvsieve_connector.connector"


def register() -> None:
    """Called by vLLM in every process, more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
