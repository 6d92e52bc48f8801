"""Entry point `vllm.general_plugins`: makes "KVSieveConnector" known by name, and registers sparse mode."""

from kvsieve_connector.settings import NAME

MODULE = "kvsieve_connector.connector"

BACKENDS = {
    "FLASHMLA_SPARSE": "HostFlashMLASparseBackend",
    "FLASH_ATTN_MLA_SPARSE": "HostFlashAttnMLASparseBackend",
    "FLASHINFER_MLA_SPARSE": "HostFlashInferMLASparseBackend",
}
"""vLLM's sparse MLA backends, and what stands in for each; the stock one unless sparse mode is on."""

FLASH_BACKEND = "kvsieve_connector.dense.gpu.backend.HostFlashAttentionBackend"
"""The same for FlashAttention."""


CPU_BACKEND = "kvsieve_connector.dense.backend.HostCPUAttentionBackend"
"""The same for vLLM's CPU attention."""


def register() -> None:
    """Called by vLLM in every process, more than once. Imports nothing that touches a device."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    _register_spec()
    _register_backends()


def _register_spec() -> None:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    # vLLM registers its own only while there are none.
    KVCacheSpecRegistry._ensure_registered()
    from kvsieve_connector.sparse.manager import HostBackedManager
    from kvsieve_connector.sparse.spec import HostBackedMLASpec, HostBackedSpec

    for spec in (HostBackedSpec, HostBackedMLASpec):
        KVCacheSpecRegistry.register(spec, HostBackedManager, uniform_type_base_spec=spec)


def _register_backends() -> None:
    """By path, imported when vLLM picks one. Those for GPUs need vLLM 0.33."""
    import vllm
    from packaging.version import Version
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    if Version(Version(vllm.__version__).base_version) < Version("0.33"):
        return
    register_backend(AttentionBackendEnum.FLASH_ATTN, FLASH_BACKEND)
    for name, ours in BACKENDS.items():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"kvsieve_connector.sparse.backends.{ours}")
