"""Imported last by the process that ranks are forked from: kernels are loaded, and nobody looks for garbage among all that
is there, in it or in ranks. Otherwise each rank loads them anew, and copies the pages that such a look writes to."""

import gc

from zbsolve import pipeline, solve
from zbsolve.systems import preset

preset("zb-h1", solve(pipeline([1] * 2, [1] * 2, [1] * 2, microbatches=2), effort=0.01).problem)
gc.collect()
gc.freeze()
