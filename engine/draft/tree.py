"""Trees of drafted tokens: several continuations of one text, to be verified in one pass.

A tree is verified as its branches, side by side: each is the whole path from the newest token to a
leaf, in a memory sequence of its own that begins as a copy of the text's (`fork`), as in
llama.cpp's examples/speculative. So every layer of every family starts from the state of its own
branch and every policy undoes it as ever; no kernel and no mask knows of trees. What it costs is
rows: what branches have in common is computed in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.draft.drafter import Draft


def branches(parents: Sequence[int]) -> list[list[int]]:
    """Nodes of every path to a leaf; a node's first child comes before its others."""
    inner, paths = set(parents), []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while (parent := parents[path[-1]]) >= 0:
                path.append(parent)
            paths.append(path[::-1])
    return sorted(paths)


def branch_of(draft: Draft, path: Sequence[int]) -> Draft:
    """The branch through these nodes as a draft of its own."""
    branch = replace(draft)
    branch.keep(path)
    branch.parents = []
    return branch


def tree_of(continuations: Sequence[Sequence[int]], widths: Sequence[int]) -> Draft:
    """Continuations of one text, the best first, with what they share only once.

    widths: most children of a node at each level, 1 below that. A continuation that would be one
    too many is left out from there on.
    """
    draft, children = Draft(), dict[int, list[int]]()
    for tokens in continuations:
        node = -1
        for level, token in enumerate(tokens):
            known = children.setdefault(node, [])
            child = next((one for one in known if draft.tokens[one] == token), None)
            if child is None:
                if len(known) == width_at(widths, level):
                    break
                child = len(draft.tokens)
                draft.tokens.append(token)
                draft.parents.append(node)
                known.append(child)
            node = child
    return draft


def width_at(widths: Sequence[int], level: int) -> int:
    """Most children of a node at a level."""
    return widths[level] if level < len(widths) else 1
