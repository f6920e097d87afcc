"""A job for spark-submit: a topic to another one, by batch and stream; says where code is from.

spark-submit submitted_job.py NAMESRV FROM TO CHECKPOINT
"""

import json
import sys
from collections.abc import Iterator

from pyspark.sql import SparkSession

import cometmq
import cometmq.spark


def place(_: Iterator[int]) -> Iterator[str]:
    import cometmq as there

    yield there.__file__


def main(namesrv: str, source: str, target: str, checkpoint: str) -> None:
    spark = SparkSession.builder.appName("submitted").getOrCreate()
    cometmq.spark.register(spark)
    spread = spark.sparkContext.parallelize(range(4), 4).mapPartitions(place)
    reader = spark.read.format("rocketmq").option("namesrv", namesrv)
    rows = reader.option("topic", source).load().select("body", "keys")
    stream = spark.readStream.format("rocketmq").option("namesrv", namesrv)
    stream = stream.option("topic", source).option("startingOffsets", "earliest")
    writer = stream.load().select("body", "keys").writeStream.format("rocketmq")
    writer = writer.option("namesrv", namesrv).option("topic", target)
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    told = {
        "master": spark.sparkContext.master,
        "driver": cometmq.__file__,
        "executors": sorted(set(spread.collect())),
        "read": rows.distinct().count(),
    }
    writer.start().awaitTermination()
    print("TOLD", json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
