"""The model: loading, forward, extraction. Knows no queue and no protocol."""
