"""What a step consists of: passes, edges and pools in columns, the ranks of its stages, and its form in files."""

from .form import MessageRoom as MessageRoom
from .problem import OBJECTIVES as OBJECTIVES
from .problem import UNLIMITED as UNLIMITED
from .problem import Problem as Problem
from .tables import Edge as Edge
from .tables import Edges as Edges
from .tables import Ints as Ints
from .tables import Pass as Pass
from .tables import Pool as Pool
from .tables import Slowdown as Slowdown
from .tables import pass_name as pass_name
