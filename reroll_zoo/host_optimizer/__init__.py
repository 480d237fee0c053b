"""AdamW for a model whose optimizer does not fit beside it (`policy.strategy.optimizer: host`).

fp32 masters and moments lie in page-locked host memory (`memory`). A step takes them through the model's device piece by
piece (`stream`), where the same kernel works on them as if they had lain there: to the same bits, and in the same files.
"""

PIECE_VALUES = 2**25
"""Of each tensor in a piece: 128 MiB in fp32. A multiple of what kernels take at once, so that no value is computed
differently for where its tensor is cut."""
NUM_SLOTS = 3
"""Pieces on the device: on its way in, at work, on its way out."""
