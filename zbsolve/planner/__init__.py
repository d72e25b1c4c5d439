"""The planner: layouts that split a training step over a cluster, from a cost model of few constants or from profiles."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .answers import PlanFront as PlanFront
    from .answers import plan_front as plan_front
    from .answers import what_if as what_if
    from .candidate import layout_profile as layout_profile
    from .cluster import CLUSTERS as CLUSTERS
    from .cluster import Cluster as Cluster
    from .cluster import cluster_by_name as cluster_by_name
    from .cluster import with_links_of as with_links_of
    from .fitting import fit as fit
    from .fitting import predict as predict
    from .layout import Layout as Layout
    from .plan_file import Plan as Plan
    from .plan_file import check_plan as check_plan
    from .profiled_model import ProfiledModel as ProfiledModel
    from .shape import SHAPES as SHAPES
    from .shape import Shape as Shape
    from .shape import shape_by_name as shape_by_name
    from .space import Only as Only

__getattr__, __dir__ = handing_on(__name__)
