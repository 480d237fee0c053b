"""AdamW for a model whose optimizer does not fit beside it (`policy.strategy.optimizer: host`).

fp32 masters and moments lie in page-locked host memory (`memory`). A step takes them through the model's device piece by
piece (`stream`), where the same kernel works on them as if they had lain there: to the same bits, and in the same files.
"""

from reroll_zoo.host_optimizer.strategy import HostOptimizerStrategy

__all__ = ["HostOptimizerStrategy"]
