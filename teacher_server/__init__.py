"""The teacher: requests in, compressed targets out."""
