"""What a user is told of an error inside Spark: the one sentence that says what to put right."""

from __future__ import annotations

from skylark.pipelines.errors import reason

IN_A_WORKER = """\
[STREAM_FAILED] Query [id = 4e2d, runId = b205] terminated with exception: Job aborted due to stage failure
Traceback (most recent call last):
  File "reading.py", line 40, in read_ranges
    raise Undecodable(
skylark.spark.bodies.Undecodable: queue 0 of topic t at broker b: the message at offset 2 is not json
\tat org.apache.spark.api.python.BasePythonRunner
"""


def test_the_innermost_error_of_ours() -> None:
    told = "queue 0 of topic t at broker b: the message at offset 2 is not json"
    assert reason(RuntimeError(IN_A_WORKER)) == told


def test_a_python_that_starts_too_slowly_for_spark() -> None:
    told = reason(RuntimeError("[STREAM_FAILED] Query failed: Python worker failed to connect back."))
    assert told.startswith("Python worker failed to connect back: Spark waits 10 s")


def test_whatever_class_it_has_and_however_long_it_is() -> None:
    told = f"batch 2 of query q was decided with {'x' * 700}; go on with failOnOtherRows=false"
    for raised in ("skylark.spark.sink.OtherRows", "skylark.client.errors.RocketMQError"):
        text = IN_A_WORKER.replace("skylark.spark.bodies.Undecodable: ", f"{raised}: {told}\nat ")
        assert reason(RuntimeError(text)) == told
