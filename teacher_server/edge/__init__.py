"""The only room that knows a protocol: gRPC for the data, HTTP for control."""
