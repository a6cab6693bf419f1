"""Distillation losses as pure tensor functions. They see torch and nothing else.

All return one value per position, in nats, in float32, whatever dtype arrives; the
caller sums, applies weights and the factor T^2, and divides by the global count.
"""

from student_trainer.losses.divergence import (
    forward_kl,
    generalized_jsd,
    log_buckets,
    reverse_kl,
    sampled_forward_kl,
)
from student_trainer.losses.hidden import hidden_cosine, hidden_mse
from student_trainer.losses.linear_chunked import chunked_loss

__all__ = [
    "chunked_loss",
    "forward_kl",
    "generalized_jsd",
    "hidden_cosine",
    "hidden_mse",
    "log_buckets",
    "reverse_kl",
    "sampled_forward_kl",
]
