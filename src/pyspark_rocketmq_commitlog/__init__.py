"""Found by Spark by its name: makes the format `rocketmq-commitlog` known without a call.

Where Spark is installed without pyarrow and numpy nothing is offered; an error here would hide all other sources.
"""

import contextlib

with contextlib.suppress(ImportError):
    from skylark.spark.offline import RocketMQCommitLog as DefaultSource  # noqa: F401
