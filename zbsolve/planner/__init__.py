"""How to split a training step at all, on which cluster: a cost model of few constants, and layouts as profiles."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .answers import Answer as Answer
    from .answers import what_if as what_if
    from .clusters.cluster import Cluster as Cluster
    from .clusters.cluster_presets import CLUSTERS as CLUSTERS
    from .clusters.cluster_presets import cluster_by_name as cluster_by_name
    from .clusters.measured_links import with_links_of as with_links_of
    from .costs.model_profile import layout_profile as layout_profile
    from .fitting.constants import fit as fit
    from .fitting.measured_rows import predict as predict
    from .fronts import PlanFront as PlanFront
    from .fronts import plan_front as plan_front
    from .layout import Layout as Layout
    from .model.profiled_model import ProfiledModel as ProfiledModel
    from .model.shape import Shape as Shape
    from .model.shapes import SHAPES as SHAPES
    from .model.shapes import shape_by_name as shape_by_name
    from .only import Only as Only
    from .plan_file import Plan as Plan
    from .plan_file import check_plan as check_plan

__getattr__, __dir__ = handing_on(
    __name__,
    {
        "answers": "Answer what_if",
        "clusters.cluster": "Cluster",
        "clusters.cluster_presets": "CLUSTERS cluster_by_name",
        "fitting.constants": "fit",
        "fronts": "PlanFront plan_front",
        "layout": "Layout",
        "only": "Only",
        "clusters.measured_links": "with_links_of",
        "fitting.measured_rows": "predict",
        "costs.model_profile": "layout_profile",
        "plan_file": "Plan check_plan",
        "model.profiled_model": "ProfiledModel",
        "model.shape": "Shape",
        "model.shapes": "SHAPES shape_by_name",
    },
)
