# SPDX-License-Identifier: Apache-2.0
"""tree_mask(): the words of attention_with_kv_cache(tree_mask=), of a tree's parents or of a mask of booleans."""
import importlib

from ._tensors import check_has_no_mask, is_torch

MOST_DRAFTS = 64  # that a word has bits for


def _check(name, array, dims):
    shape = tuple(array.shape)
    if len(shape) < dims:
        raise ValueError(f"{name}.ndim = {len(shape)} but it must be at least {dims}")
    if shape[-1] > MOST_DRAFTS:
        raise ValueError(f"{name}.shape[-1] = {shape[-1]} but it must be at most {MOST_DRAFTS}: a word has a bit for each draft")
    if shape[-dims] != shape[-1]:
        raise ValueError(f"{name}.shape[-2] = {shape[-2]} but {name}.shape[-1] = {shape[-1]}; each draft sees or does not see each")


def tree_mask(parents=None, *, seen=None):
    """Which drafts each draft sees, for attention_with_kv_cache(tree_mask=). Give exactly one of the arguments.

    Args:
        parents: [..., seq_q] integers: the index of each draft's parent among the drafts of its sequence; negative: it has none,
            and follows the existing keys. A draft sees itself and its ancestors. Parents need not come before their children.
            The result of a cycle is undefined.
        seen: [..., seq_q, seq_q] booleans, or numbers of which all but 0 are true: seen[..., i, j] says whether draft i sees
            draft j.

    Returns:
        Words of int64, [..., seq_q], in a tensor on the argument's device if that is a torch tensor, otherwise in a numpy array.
    """
    if (parents is None) == (seen is None):
        raise TypeError("tree_mask() takes parents or seen, and one of them")
    given = parents if seen is None else seen
    check_has_no_mask("parents" if seen is None else "seen", given)
    library = importlib.import_module("torch" if is_torch(given) else "numpy")
    given = library.asarray(given)
    if seen is None:
        _check("parents", given, 1)
        return _of_parents(library, given)
    _check("seen", given, 2)
    return library.where(given != 0, _bits(library, given), 0).sum(-1)


def _bits(library, like):
    """Bit j at each place j of the last dimension."""
    ones = library.ones_like(like, dtype=library.int64)
    return ones << (ones.cumsum(-1) - 1)


def _of_parents(library, parents):
    bits, count = _bits(library, parents), parents.shape[-1]
    # One more draft, which is the forefather of all and has no bit.
    root = library.ones_like(bits[..., :1])
    above = library.concatenate([library.where(parents < 0, count, parents + 0 * bits), count * root], -1)
    words = library.concatenate([bits, 0 * root], -1)
    take = library.take_along_dim if library.__name__ == "torch" else library.take_along_axis
    for _ in range((count - 1).bit_length() if count > 0 else 0):  # each doubles how far a draft looks up
        words = words | take(words, above, -1)
        above = take(above, above, -1)
    return words[..., :count]
