# SPDX-License-Identifier: Apache-2.0
"""score_mods of torch's FlexAttention as graphs of torch's operators. What is found in a graph is kept for all functions of the same code
whose constants are the same, and whose tensors have the same dtypes, shapes and devices: their values are not in the graph."""
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ._flex_nodes import INDICES
from ._flex_scores import Refused, Scores, recognised
from ._mask_kept import Unknown, state_of
from ._mask_make import is_capturing

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LONGEST = 500  # operators of a graph
_MOST = 64  # graphs that are kept; the one that was used longest ago goes first
_kept = {}  # what tells functions apart: (Scores or why not, which of the function's tensors they use)
_READS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr}


class _Watched(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._C._set_grad_enabled:
            raise Refused("sets whether gradients are recorded")
        if function in _READS:
            raise Refused(f"calls {function.__name__}() of a tensor")
        return function(*args, **(kwargs or {}))


class _Pure(TorchDispatchMode):
    """Refuses operators whose results a graph does not tell, before they run."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise Refused("reads the value of a tensor, for a condition or a number")
        if operator._schema.is_mutable:
            raise Refused(f"changes a tensor, by {operator._schema.name.removeprefix('aten::')}")
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise Refused("draws random numbers")
        return operator(*args, **(kwargs or {}))


def _is_plain(x):
    return type(x) in _PLAIN and x.layout is torch.strided and not x.is_nested


def _has_own_gradients(output, captured, known):
    """Whether an autograd.Function other than known stands between captured tensors or the score and the output."""
    waiting, seen = [output.grad_fn], {x.grad_fn for x in captured} | {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not isinstance(node, known._backward_cls):
            return True
        waiting += (x for x, _ in node.next_functions)
    return False


def _trace(score_mod, device):
    """(graph, {name: tensor}) of a score_mod."""
    from torch._dynamo._trace_wrapped_higher_order_op import ModIndex, TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx
    results = []

    def called(*arguments):
        with TransformGetItemToIndex(), _Watched(), _Pure():
            results.append(score_mod(*arguments))
        return results[0]

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        score = torch.zeros((), device=device, requires_grad=True)  # float32, as torch computes scores
        module = make_fx(called)(score, *(torch.zeros((), dtype=torch.int64, device=device) for _ in INDICES))
    if not isinstance(results[0], torch.Tensor) or results[0].dim():
        raise Refused("returns something other than a tensor of no dimensions")
    module.graph.eliminate_dead_code()
    tensors = {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}
    if not all(map(_is_plain, tensors.values())):
        raise Refused("uses a tensor that is not a plain one")
    if _has_own_gradients(results[0], tensors.values(), ModIndex):
        raise Refused("has gradients of its own, by an autograd.Function")
    if len(module.graph.nodes) > _LONGEST:
        raise Refused(f"has more than {_LONGEST} operators")
    return module.graph, tensors


def _found(score_mod, device):
    """(Scores, or why flash3 does not compute the function; the captured tensors that it uses, None if the answer is for this call alone)."""
    try:
        graph, tensors = _trace(score_mod, device)
        fresh = {node.target for node in graph.nodes if node.op == "get_attr" and
                 all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)}
        captured = [name for name in tensors if name not in fresh]
        found = recognised(graph, {name: tensors[name] for name in fresh}, {name: n for n, name in enumerate(captured)})
        return found, [tensors[name] for name in captured]
    except Refused as refused:
        return f"score_mod {refused}", []
    except Exception as error:  # whatever the function raises: torch calls it again
        first = str(error).partition("\n")[0]
        return f"score_mod cannot be traced: {type(error).__name__}: {first[:200]}", None


def _about(tensors):
    """A function of a tensor that notes it, and says all that a graph depends on."""
    def of_tensor(x):
        if not _is_plain(x):
            raise Unknown
        place = next((n for n, other in enumerate(tensors) if other is x), len(tensors))
        if place == len(tensors):
            tensors.append(x)
        return place, type(x), x.dtype, tuple(x.shape), x.stride(), x.device, x.requires_grad
    return of_tensor


def _check_plain(tensors):
    if not all(map(_is_plain, tensors)):
        raise Refused("score_mod is given, and not all are plain tensors")
    if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing() or _get_current_dispatch_mode() is not None:
        raise Refused("score_mod is given, and something traces or transforms the call")


def scores_of(score_mod, of_call):
    """(Scores, the tensors that they use) of a score_mod; of_call: query and the other tensors of the call.

    Raises:
        Refused: flash3 does not compute it.
    """
    _check_plain(of_call)
    device, tensors = of_call[0].device, []
    structure = state_of(score_mod, _about(tensors))
    key = structure, device, torch.get_default_dtype(), torch.get_default_device()
    kept = None if structure is None else _kept.pop(key, None)  # another thread may do all of this too
    if kept is not None:
        found, places = kept
        captured = [tensors[n] for n in places]
    elif is_capturing(device):
        raise Refused("score_mod was not seen before, or cannot be compared with those that were, and a CUDA graph is being captured")
    else:
        found, captured = _found(score_mod, device)
        places = None if captured is None else [next((n for n, x in enumerate(tensors) if x is own), None) for own in captured]
    if structure is not None and places is not None and None not in places:
        _kept[key] = found, places  # the newest is the last one
        if len(_kept) > _MOST:
            _kept.pop(next(iter(_kept)), None)
    if isinstance(found, str):
        raise Refused(found)
    return found, captured
