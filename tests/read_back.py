"""Training batches of one data shard, as tensors, through the real stream."""

from collections.abc import Iterator

from moray.activations.format.manifest import Manifest
from moray.activations.reading.epochs import EpochPlan
from moray.batch import TapNeeds, TrainBatch


def stream_batches(uri: str, manifest: Manifest, plan: EpochPlan, needs: TapNeeds) -> Iterator[TrainBatch]:
    """The batches of a plan, one after the other. Needs a Ray session."""
    from moray.cluster.training.stream import Reader, stream_updates

    for (data_shard,) in stream_updates(Reader(uri, manifest, needs), {0: plan}):
        yield data_shard.whole("cpu")
