"""`layout_profile`: a model on a cluster under one layout, as an ordinary `Profile`: first layer, blocks, last layer."""

from __future__ import annotations

from ...features.cuts import SEQUENCE
from ...layer import Link
from ...profile.profile import Profile
from ..clusters.cluster import Cluster
from ..layout import Layout
from .exchange_costs import group_link, shards_of
from .host_copies import host_link
from .layer_bytes import WEIGHT_BYTES
from .layer_costs import Model, model_costs, sharded_vocabulary
from .layer_times import message_rate


def layout_profile(model: Model, layout: Layout, cluster: Cluster) -> Profile:
    """The model's layers on the devices of one pipeline rank, for one microbatch; messages occupy their sender.

    Layers' times are whole µs: then every partition's passes are their exact sums, and a bound for all of them is one for
    each. capacity: the device's memory. What follows the exchange of gradients is not in it (see
    `layer_times.after_exchange`). A layout with replicas is for `Step(replicas=)`, or `Step(shards=)` where stages gather:
    the profile's `shard_link` gives a stage's C, or its AG and its RS, their time. One with a sharded vocabulary is for
    `Step(vocabulary="sharded")`: the profile says what its shards cost. One in slices is for `Step(slices=)`: layers say
    what causal attention takes, and what each slice takes beyond its part. One with offload is for `Step(offload=)`. Raises
    BadInput for a layout that the model's profiles or the cluster do not know.
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
