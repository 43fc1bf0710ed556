"""Training weights to rollout weights: export, buckets, receiving, verification."""

from nemo_rl_dsv4.refit.buckets import pack_buckets
from nemo_rl_dsv4.refit.export import export_tensor, export_weights
from nemo_rl_dsv4.refit.receive import receive_weights
from nemo_rl_dsv4.refit.report import RefitReport, StreamTally
from nemo_rl_dsv4.refit.source_scales import SourceScales
from nemo_rl_dsv4.refit.verify import VerifyReport, verify_export

__all__ = [
    "RefitReport",
    "SourceScales",
    "StreamTally",
    "VerifyReport",
    "export_tensor",
    "export_weights",
    "pack_buckets",
    "receive_weights",
    "verify_export",
]
