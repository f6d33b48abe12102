"""The Spark session and the servers of the Spark tests, for pipelines."""

from spark.conftest import group, namesrv, server, spark, topic

__all__ = ["group", "namesrv", "server", "spark", "topic"]
