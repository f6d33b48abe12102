"""Topics as tables and streams in Spark.

    from skylark import spark as rocketmq

    rocketmq.register(spark)
    spark.read.format("rocketmq").option("nameServer", "localhost:9876").option("subscribe", "orders").load()

Spark finds the formats by itself as well; `register` also has progress committed to consumer groups after every batch.
"""

from skylark.extras import how_to_install

try:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import pyspark  # noqa: F401
except ImportError as e:
    raise ImportError(f"{e}; {how_to_install('spark')} brings what Spark needs") from e

from skylark.spark.registration import register

__all__ = ["register"]
