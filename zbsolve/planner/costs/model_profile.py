"""`layout_profile`: a model on a cluster under one layout, as an ordinary `Profile`: first layer, blocks, last layer."""

from __future__ import annotations

from ...layer import Link
from ...profile.cuts import SEQUENCE
from ...profile.profile import Profile
from ..clusters.cluster import Cluster
from ..layout import Layout
from .exchange_costs import group_link, shards_of
from .host_copies import host_link
from .layer_bytes import WEIGHT_BYTES
from .layer_costs import Model, model_costs, sharded_vocabulary
from .layer_times import message_rate


def layout_profile(model: Model, layout: Layout, cluster: Cluster) -> Profile:
    """The model's layers on the devices of one pipeline rank, for one microbatch. Messages occupy their sender.

    model: a shape, or profiles at several sizes.
    layout: how the step is split. One with replicas is for `Step(replicas=)`, or `Step(shards=)` where stages gather: the
        profile's `shard_link` gives C, or AG and RS, their time. One with a sharded vocabulary is for
        `Step(vocabulary="sharded")`, one in slices for `Step(slices=)`, one with offload for `Step(offload=)`.
    cluster: its devices and links. The profile's capacity is the device's memory.

    Layers' times are whole µs: then every partition's passes are their exact sums, and a bound for all of them is one for
    each. What follows the exchange of gradients is not in it (see `layer_times.after_exchange`). Raises BadInput for a
    layout that the model's profiles or the cluster do not know.
    """
    slices = int(layout.slices)
    costs = model_costs(model, layout, cluster)
    first, block, last = costs.first, costs.block, costs.last
    blocks = (block.layer(f"block{i}", slices) for i in range(model.layers))
    facts = {"cluster": cluster.name, "layout": {name: int(value) for name, value in layout._asdict().items()}}
    return Profile(
        f"estimated: {model.source}, {cluster.title}",
        f"{model.name}, {layout.title}",
        (first.layer("embedding", slices), *blocks, last.layer("head", slices)),
        Link(0.0, float(message_rate(layout, cluster)), blocking=True),
        float(costs.states) if shards_of(layout) == 1 else sum(model.state_parts) / WEIGHT_BYTES,
        cluster.memory,
        {**facts, SEQUENCE: model.sequence} if slices > 1 else facts,
        {},
        tied=((int(costs.shared), (0, model.layers + 1)),) if costs.shared else (),
        host=host_link(cluster) if layout.offload else None,
        shard_link=group_link(layout, cluster),
        vocabulary=sharded_vocabulary(model, layout, cluster) if layout.vocabulary else None,
        gradients=1.0 if shards_of(layout) == 1 else model.state_parts[1] / WEIGHT_BYTES,
    )
