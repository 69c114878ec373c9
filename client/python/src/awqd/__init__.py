"""Client of awqd, the inference server for weight-only quantised checkpoints.

    import awqd, numpy as np

    client = awqd.Client("127.0.0.1:8001")
    x = np.random.default_rng(0).standard_normal((4, 384)).astype(np.float16)
    y = client.matmul("all-MiniLM-L6-v2-awq", "encoder.layer.0.intermediate.dense", x)

AsyncClient has the same calls as coroutines. A call that fails raises a subclass of Error.
"""
from awqd._calls import KvCodes, Router, Step, packed_weight
from awqd._client import AsyncClient, Client
from awqd._device import Region
from awqd._errors import (AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition, Internal,
                          InvalidArgument, NotFound, PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable,
                          Unimplemented)
from awqd.v1.inference_pb2 import GatedMlpRef, PackedGatedMlp, PackedStack
from awqd.v1.tensor_pb2 import Execution, PackedWeight

__all__ = [
    "AlreadyExists", "AsyncClient", "Cancelled", "Client", "DataLoss", "DeadlineExceeded", "Error", "Execution",
    "FailedPrecondition", "GatedMlpRef", "Internal", "InvalidArgument", "KvCodes", "NotFound", "PackedGatedMlp",
    "PackedStack", "PackedWeight", "PermissionDenied", "Region", "ResourceExhausted", "Router", "Step", "Unauthenticated",
    "Unavailable",
    "Unimplemented", "packed_weight",
]
__version__ = "0.1.0"
