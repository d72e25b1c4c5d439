"""How to split a training step at all, on which cluster: a cost model of few constants, and layouts as profiles."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .answers import Answer as Answer
    from .answers import what_if as what_if
    from .cluster import Cluster as Cluster
    from .cluster_presets import CLUSTERS as CLUSTERS
    from .cluster_presets import cluster_by_name as cluster_by_name
    from .constants import fit as fit
    from .fronts import PlanFront as PlanFront
    from .fronts import plan_front as plan_front
    from .layout import Layout as Layout
    from .measured_links import with_links_of as with_links_of
    from .measured_rows import predict as predict
    from .model_profile import layout_profile as layout_profile
    from .plan_file import Plan as Plan
    from .plan_file import check_plan as check_plan
    from .profiled_model import ProfiledModel as ProfiledModel
    from .shape import Shape as Shape
    from .shapes import SHAPES as SHAPES
    from .shapes import shape_by_name as shape_by_name

__getattr__, __dir__ = handing_on(
    __name__,
    {
        "answers": "Answer what_if",
        "cluster": "Cluster",
        "cluster_presets": "CLUSTERS cluster_by_name",
        "constants": "fit",
        "fronts": "PlanFront plan_front",
        "layout": "Layout",
        "measured_links": "with_links_of",
        "measured_rows": "predict",
        "model_profile": "layout_profile",
        "plan_file": "Plan check_plan",
        "profiled_model": "ProfiledModel",
        "shape": "Shape",
        "shapes": "SHAPES shape_by_name",
    },
)
