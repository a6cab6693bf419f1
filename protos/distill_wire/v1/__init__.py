"""Generated protobuf messages and gRPC stubs of `distill_wire.v1`; made by `make protos`."""
