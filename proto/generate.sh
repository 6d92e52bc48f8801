#!/usr/bin/env bash
# Generates the Python code of the protocol beside the .proto files, or with --check says whether it is current.
set -euo pipefail
cd "$(dirname "$0")"
# The generator sets the oldest protobuf and grpcio that the code runs on; "make proto" pins it.
python="${PYTHON:-python3}"
out=.
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
"$python" -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  kvsieve/v1/store.proto kvsieve/v1/admin.proto kvsieve/v1/peer.proto
if [ "$out" != . ]; then
  for f in "$out"/kvsieve/v1/*; do
    diff -u "kvsieve/v1/$(basename "$f")" "$f" || { echo "stale generated code: run 'make proto'" >&2; exit 1; }
  done
fi
