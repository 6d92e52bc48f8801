"""What stands in for vLLM's sparse MLA backends: stock classes outside sparse mode, ours before them in it.

Nothing is run here. A CPU build of vLLM lacks FlashAttention's extension, which only has to be importable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402

from kvsieve_connector import plugin  # noqa: E402
from kvsieve_connector.settings import NAME  # noqa: E402
from kvsieve_connector.sparse import building  # noqa: E402
from kvsieve_connector.sparse.attention import HostBackedAttention  # noqa: E402
from kvsieve_connector.sparse.spec import HostBackedMLASpec  # noqa: E402

PACKAGE = "vllm.vllm_flash_attn"


@pytest.fixture(scope="module")
def backends() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        try:
            __import__(f"{PACKAGE}.flash_attn_interface")
        except ImportError:
            package, interface = ModuleType(PACKAGE), ModuleType(f"{PACKAGE}.flash_attn_interface")
            package.__path__ = []
            interface.__dict__.update(flash_attn_varlen_func=None)
            patch.setitem(sys.modules, package.__name__, package)
            patch.setitem(sys.modules, interface.__name__, interface)
        from kvsieve_connector.sparse import backends

        yield backends


def engine(mode: str) -> Any:
    """A DSA model in bf16, as far as backends ask for it."""
    text = SimpleNamespace(index_topk=2048, kv_lora_rank=512, qk_rope_head_dim=64)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, model="m", dtype=torch.bfloat16),
        cache_config=SimpleNamespace(block_size=64, cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(
            kv_connector=NAME, kv_connector_extra_config={"kvsieve.mode": mode}
        ),
        num_speculative_tokens=0,
    )


@pytest.fixture
def build(backends: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """build(mode): the engine whose model is built from now on."""
    monkeypatch.setattr(building, "_config", None)

    def build(mode: str) -> None:
        monkeypatch.setattr(building, "get_current_vllm_config_or_none", lambda: engine(mode))

    return build


@pytest.fixture(params=plugin.BACKENDS)
def pair(request: pytest.FixtureRequest, backends: Any) -> tuple[Any, Any]:
    """One of ours, and the stock backend that it stands in for."""
    ours = getattr(backends, plugin.BACKENDS[request.param])
    assert ours.get_name() == request.param
    return ours, ours.__mro__[2]


def spec() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def test_ours_is_the_stock_backend_by_name_and_by_what_it_supports(pair: tuple[Any, Any]) -> None:
    ours, stock = pair
    assert issubclass(ours, stock)
    assert stock.__module__.startswith("vllm.")
    assert ours.get_name() == stock.get_name()
    assert ours.get_supported_kernel_block_sizes() == stock.get_supported_kernel_block_sizes()
    assert ours.supported_kv_cache_dtypes == stock.supported_kv_cache_dtypes
    assert ours.is_sparse()


@pytest.mark.parametrize("mode", ["cache", None], ids=["cache mode", "no engine yet"])
def test_outside_sparse_mode_all_of_it_is_stock(
    pair: tuple[Any, Any], build: Callable[[str], None], backends: Any, mode: str | None
) -> None:
    ours, stock = pair
    if mode is not None:
        build(mode)
    assert ours.get_impl_cls() is stock.get_impl_cls()
    assert ours.get_builder_cls() is stock.get_builder_cls()
    assert ours.customize_spec(spec()) == stock.customize_spec(spec())


def test_in_sparse_mode_our_methods_come_before_the_stock_ones(
    pair: tuple[Any, Any], build: Callable[[str], None]
) -> None:
    ours, stock = pair
    build("sparse")
    impl, stock_impl = ours.get_impl_cls(), stock.get_impl_cls()
    assert issubclass(impl, HostBackedAttention)
    assert issubclass(impl, stock_impl)
    order = impl.__mro__
    assert order.index(HostBackedAttention) < order.index(stock_impl)
    for method in ("forward_mqa", "_convert_logical_to_physical_topk"):
        assert getattr(impl, method) is getattr(HostBackedAttention, method)
        assert hasattr(stock_impl, method), "vLLM has it no more"


def test_in_sparse_mode_only_rows_of_decode_steps_count_as_decodes(
    pair: tuple[Any, Any], build: Callable[[str], None], backends: Any
) -> None:
    ours, stock = pair
    build("sparse")
    builder, stock_builder = ours.get_builder_cls(), stock.get_builder_cls()
    assert issubclass(builder, stock_builder)
    order = builder.__mro__
    assert order.index(backends._HostBuilder) < order.index(stock_builder)
    assert builder.require_uniform_decodes


class _Threshold(AttentionMetadataBuilder):  # type: ignore[misc]
    """A stock builder, as far as it finds out what a decode step is."""

    supports_spec_as_decode = True

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.vllm_config = vllm_config
        self._init_reorder_batch_threshold(256, supports_spec_as_decode=self.supports_spec_as_decode)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _engine_with_drafts(drafts: int) -> Any:
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    return SimpleNamespace(
        attention_config=SimpleNamespace(sparse_mla_force_mqa=False),
        num_speculative_tokens=drafts,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=speculative if drafts else None,
        use_v2_model_runner=True,
    )


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_decode_step_is_the_last_token_and_its_drafts(backends: Any, drafts: int) -> None:
    class Builder(backends._HostBuilder, _Threshold):  # type: ignore[misc, name-defined]
        pass

    config = _engine_with_drafts(drafts)
    assert Builder(None, [], config, torch.device("cpu")).reorder_batch_threshold == 1 + drafts
    assert config.attention_config.sparse_mla_force_mqa


def test_a_backend_that_takes_drafts_for_a_prompt_is_refused(backends: Any) -> None:
    class Builder(backends._HostBuilder, _Threshold):  # type: ignore[misc, name-defined]
        supports_spec_as_decode = False

    with pytest.raises(ValueError, match=r"takes up to 1 tokens .* num_speculative_tokens=3 it must be 4"):
        Builder(None, [], _engine_with_drafts(3), torch.device("cpu"))


def test_in_sparse_mode_the_spec_of_a_main_layer_is_host_backed(
    pair: tuple[Any, Any], build: Callable[[str], None]
) -> None:
    ours, stock = pair
    build("sparse")
    found, plain = ours.customize_spec(spec()), stock.customize_spec(spec())
    assert type(found) is HostBackedMLASpec
    assert (found.window_blocks, found.hot_blocks) == (2, 48)
    assert found.page_size_bytes == plain.page_size_bytes == 64 * 1152
    # What the stock backend asks of the layout stays.
    assert found.block_stride_alignment == plain.block_stride_alignment


def test_the_spec_is_host_backed_when_vllm_asks_after_the_model_is_built(
    pair: tuple[Any, Any], build: Callable[[str], None], backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair
    build("sparse")
    ours.get_impl_cls()
    monkeypatch.setattr(building, "get_current_vllm_config_or_none", lambda: None)
    assert type(ours.customize_spec(spec())) is HostBackedMLASpec


@pytest.mark.parametrize("name", ["FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE"])
def test_rows_come_from_the_swap_in_where_stock_may_convert_past_our_method(
    backends: Any, build: Callable[[str], None], name: str
) -> None:
    build("sparse")
    impl = getattr(backends, plugin.BACKENDS[name]).get_impl_cls()
    bare = impl.__new__(impl)
    bare._layer = "a host-backed layer"
    assert not bare.group_conversion_decode_only


BATCHES = {"decodes": [1, 1, 1], "prefills": [70, 5], "both": [1, 1, 40, 7]}
"""Tokens of each request in the step; each has 100 before."""


def _batch(tokens: list[int]) -> list[Any]:
    """What two main groups' builders are given for one batch."""
    starts = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([100 + n for n in tokens], dtype=torch.int32)
    total, requests = sum(tokens), len(tokens)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        max_seq_len=int(lengths.max()),
        num_reqs=requests,
        num_actual_tokens=total,
        max_query_len=max(tokens),
        block_table_tensor=torch.arange(4 * requests, dtype=torch.int32).view(requests, 4),
        slot_mapping=torch.arange(total),
        is_prefilling=torch.tensor([n > 1 for n in tokens]),
        # vLLM's kernel for this needs a device.
        _token_to_req_indices_cache=torch.arange(requests, dtype=torch.int32).repeat_interleave(
            torch.tensor(tokens)
        ),
    )
    other = replace(
        common, block_table_tensor=100 + common.block_table_tensor, slot_mapping=100 + common.slot_mapping
    )
    return [common, other]


@pytest.fixture(params=["HostFlashMLASparseBuilder", "HostFlashAttnMLASparseBuilder"])
def metadata_of(request: pytest.FixtureRequest, backends: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """metadata_of(what a builder is given): what a new builder makes of it; each group has its own."""
    from vllm.v1.attention.backends.mla import flashmla_sparse

    zeros = torch.zeros
    for module in (backends, flashmla_sparse):
        monkeypatch.setattr(module, "get_mla_metadata", lambda: (SimpleNamespace(), None))
    # There is no device to pin memory for.
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **kw: zeros(*a, **kw))
    cls = getattr(backends, request.param)
    monkeypatch.setattr(cls, "_built", None)

    def metadata_of(common: Any) -> Any:
        builder = cls.__new__(cls)
        model = SimpleNamespace(max_model_len=4096, dtype=torch.bfloat16)
        attention = SimpleNamespace(hisparse_config=None, sparse_mla_prefill_workspace_factor=5)
        builder.__dict__.update(
            vllm_config=SimpleNamespace(model_config=model, attention_config=attention),
            model_config=model,
            device=torch.device("cpu"),
            kv_cache_spec=SimpleNamespace(block_size=64),
            topk_tokens=2048,
            reorder_batch_threshold=1,
            req_id_per_token_buffer=zeros(256, dtype=torch.int32),
            use_pcp=False,
            pcp_dcp_kv_gather=False,
            cp_kv_cache_interleave_size=1,
            use_fp8_kv_cache=True,
            fp8_use_mixed_batch=False,
            _prefill_backend=None,
            dummy_block_table=zeros((16, 1), dtype=torch.int32),
            max_model_len_tensor=torch.full((16,), 4096),
            _has_drafter=metadata_of.has_drafter,
        )
        return builder.build(0, common)

    metadata_of.cls, metadata_of.has_drafter = cls, False  # type: ignore[attr-defined]
    return metadata_of


def _plain(value: Any) -> Any:
    """A dataclass and what is in it, in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, list) else repr(value)


@pytest.mark.parametrize("has_drafter", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_second_group_gets_what_it_would_have_built(
    metadata_of: Any, batch: str, has_drafter: bool
) -> None:
    """Save for what FlashMLA's kernel fills in at its first layer: once for all, if all are in one graph."""
    metadata_of.has_drafter = has_drafter
    common, other = _batch(BATCHES[batch])
    first, shared = metadata_of(common), metadata_of(other)
    assert metadata_of.cls._built[1] is first
    metadata_of.cls._built = None
    own = metadata_of(other)
    assert own is metadata_of.cls._built[1]
    assert _plain(shared) == _plain(own)
    assert _plain(first) != _plain(own)
    assert shared.block_table is other.block_table_tensor
    if (fp8 := getattr(shared, "fp8_extra_metadata", None)) is not None and fp8.decode is not None:
        kernels = [m.fp8_extra_metadata.decode.kernel_metadata for m in (first, shared)]
        assert (kernels[0].scheduler_metadata is kernels[1].scheduler_metadata) == (not has_drafter)


def test_a_batch_of_the_same_numbers_is_another_batch(metadata_of: Any) -> None:
    first = metadata_of(_batch([1, 40])[0])
    common = _batch([1, 40])[0]
    common.seq_lens += 64
    common.seq_lens_cpu_upper_bound += 64
    second = metadata_of(common)
    assert metadata_of.cls._built[1] is second
    assert second.seq_lens.tolist() == (first.seq_lens + 64).tolist()


def test_vllm_makes_lengths_once_for_all_groups_of_a_batch_and_anew_for_the_next(backends: Any) -> None:
    """Also where the next batch is as large, in the same buffers: what is built for one never serves two."""
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

    given: list[Any] = []
    group = SimpleNamespace(
        kv_cache_spec=None,
        layer_names=["a layer"],
        get_metadata_builder=lambda ubatch: SimpleNamespace(supports_update_block_table=False),
        build_metadata=lambda common, ubatch: given.append(common),
    )
    starts, lengths = torch.arange(5, dtype=torch.int32), torch.full((4,), 100, dtype=torch.int32)
    tables = torch.zeros(2, 4, 4, dtype=torch.int32)
    for _ in range(2):
        build_attn_metadata(
            attn_groups=[[group], [group]],
            num_reqs=4,
            num_tokens=4,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts,
            max_query_len=1,
            seq_lens=lengths,
            max_seq_len=100,
            block_tables=[tables[0], tables[1]],
            slot_mappings=torch.zeros(2, 4, dtype=torch.int64),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None, None]),
        )
    assert backends._is_same_batch(given[0], given[1])
    assert backends._is_same_batch(given[2], given[3])
    assert not backends._is_same_batch(given[1], given[2])
