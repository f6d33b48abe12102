"""For Spark's Python processes in tests: they connect to their JVM first, and import pyspark then.

Spark gives the process of a streaming source 10 s to connect and 10 s to say its secret, without a setting. The import
takes a second of CPU, and longer than that on a machine that runs two suites and more. What else the process does, and
how long it takes for it, is as always.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

PORT, SECRET = "PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SECRET"


def connect_now() -> None:
    connection = socket.create_connection(("127.0.0.1", int(os.environ[PORT])))
    stream = connection.makefile("rwb", 65536)
    secret = os.environ[SECRET].encode()
    stream.write(struct.pack(">i", len(secret)) + secret)
    stream.flush()
    (size,) = struct.unpack(">i", stream.read(4))
    if stream.read(size) != b"ok":
        sys.exit("Spark does not know this process")
    import pyspark.util

    connect, made = pyspark.util.local_connect_and_auth, [(stream, connection)]
    pyspark.util.local_connect_and_auth = lambda *told: made.pop() if made else connect(*told)


if sys.orig_argv[-2:-1] == ["-m"] and sys.orig_argv[-1].startswith("pyspark.") and {PORT, SECRET} <= os.environ.keys():
    connect_now()
