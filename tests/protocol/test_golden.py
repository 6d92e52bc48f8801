"""The wire against recorded bytes, and the generated code against the .proto files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from kvsieve.v1 import peer_pb2, store_pb2, store_pb2_grpc
from kvsieve_store.protocol.spec import PoolSpec

GOLDEN = Path(__file__).parent / "golden"
PROTO = Path(store_pb2.__file__).parents[2]

MESSAGES: list[dict[str, Any]] = json.loads((GOLDEN / "messages.json").read_text())
POOL_IDS: list[dict[str, Any]] = json.loads((GOLDEN / "pool_ids.json").read_text())

KINDS = {
    name: getattr(module, name)
    for module in (store_pb2, peer_pb2)
    for name in module.DESCRIPTOR.message_types_by_name
}


@pytest.mark.parametrize("vector", MESSAGES, ids=[vector["message"] for vector in MESSAGES])
def test_recorded_bytes_mean_the_same_and_are_written_the_same(vector: dict[str, Any]) -> None:
    kind = KINDS[vector["message"]]
    recorded = bytes.fromhex(vector["hex"])
    message = kind.FromString(recorded)
    assert message == json_format.ParseDict(vector["fields"], kind())
    assert message.SerializeToString(deterministic=True) == recorded


def test_every_field_of_every_message_is_recorded() -> None:
    recorded = {(vector["message"], field) for vector in MESSAGES for field in vector["fields"]}
    assert recorded == {
        (message.name, field.name)
        for message in (kind.DESCRIPTOR for kind in KINDS.values())
        for field in message.fields
    }


@pytest.mark.parametrize("vector", POOL_IDS, ids=[vector["spec"]["name"] for vector in POOL_IDS])
def test_pool_ids(vector: dict[str, Any]) -> None:
    spec = PoolSpec.from_proto(json_format.ParseDict(vector["spec"], store_pb2.PoolSpec()))
    assert spec.canonical().decode("ascii") == vector["canonical"]
    assert spec.pool_id().hex() == vector["pool_id"]
    assert hashlib.sha256(vector["canonical"].encode()).hexdigest() == vector["pool_id"]
    assert PoolSpec.from_proto(spec.to_proto()) == spec


def test_generated_code_is_current() -> None:
    wanted = store_pb2_grpc.GRPC_GENERATED_VERSION
    try:
        installed = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("grpcio-tools is not installed")
    if installed != wanted:
        pytest.skip(f"grpcio-tools {installed} is installed, the code is of {wanted}; `make lint` compares")
    check = subprocess.run(
        ["bash", str(PROTO / "generate.sh"), "--check"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stdout + check.stderr
