"""Jobs."""
import torch
from torch import nn
from zbsolve.build import Vocabulary, with_vocabulary
from zbsolve.exec import Pipeline
from zbsolve.models.losses import CrossEntropy
from zbsolve.exec.check import difference, named, reference
from zbsolve.exec.handlers import Data
from .exec_tools import a_problem, random_schedule

def first(rank, arg):
    problem = with_vocabulary(a_problem((0,1),4,layers=3), Vocabulary(3,3,broadcast=1,reduce=2,held_shard=[10*6*8+10*18,10*5*8+180],held_hidden=10*8*8))
    def make():
        torch.manual_seed(0)
        return [nn.Embedding(11,8,dtype=torch.float64), nn.Linear(8,8,dtype=torch.float64), nn.Sequential(nn.LayerNorm(8,dtype=torch.float64), nn.Linear(8,11,dtype=torch.float64))]
    loss=CrossEntropy()
    pipe = Pipeline(make(), random_schedule(problem, 1, in_order=True), loss=loss, timeout=6)
    x = torch.randint(0,11,(8,5),generator=torch.Generator().manual_seed(1)); y=x.roll(1,1)
    r = pipe.step(x,y,memory=True)
    whole = make()
    ins, tgs = (dict(enumerate(p.chunk(4))) for p in (x,y))
    l = reference(whole, Data(ins,tgs), loss)
    right = named(dict(enumerate(whole)))
    out={"loss":abs(l-r.loss)}
    for k,p in pipe.named_parameters():
        if k=="vocabulary.weight":
            g=right[2,"1.weight"].grad; f=pipe._runner.interpreter.state.vocabulary.output.first
            out[k]=difference(p.grad,g[f:f+p.shape[0]])
        elif k=="vocabulary.bias":
            g=right[2,"1.bias"].grad; f=pipe._runner.interpreter.state.vocabulary.output.first
            out[k]=difference(p.grad,g[f:f+p.shape[0]])
        else:
            i,n=k.split(".",1); out[k]=difference(p.grad,right[int(i),n].grad)


    out["mem"]=[list(z) for z in zip(r.memory.names, r.memory.held, r.memory.predicted)]
    return out
