"""How deep llguidance may go into a JSON Schema: nesting, and references followed.

It compiles what a reference leads to where it first meets it, and only once.  In which order it
meets them we do not follow: what is counted is the most that any order may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

__all__ = ["depth_bound"]


def depth_bound(schema: object, resolve: Callable[[str], object]) -> int:
    """The most containers that may lie within one another, what is referred to included.

    Args:
        schema: JSON data of which no container occurs twice, as `json.loads` gives it.
        resolve: what a reference leads to.
    """
    nodes, parents = _containers(schema)
    number = {id(node): i for i, node in enumerate(nodes)}
    edges: list[list[int]] = [[] for _ in nodes]
    referred: set[int] = set()
    for i, parent in enumerate(parents[1:], start=1):
        edges[parent].append(i)
    for i, node in enumerate(nodes):
        if isinstance(node, Mapping) and isinstance(ref := node.get("$ref"), str):
            target = number.get(id(resolve(ref)))
            if target is not None:
                edges[i].append(target)
                referred.add(target)
    group = _cycles(edges)

    # How deep each node's group goes below it, without references.
    below = [1] * len(nodes)
    for i in range(len(nodes) - 1, 0, -1):
        if group[i] == group[parents[i]]:
            below[parents[i]] = max(below[parents[i]], 1 + below[i])
    # Within a cycle one goes down from where one enters, and once from all that is referred to.
    own = [0] * len(nodes)
    for i, depth in enumerate(below):
        own[group[i]] = max(own[group[i]], depth)
    sizes = Counter(group)
    for i in referred:
        if sizes[group[i]] > 1 or i in edges[i]:
            own[group[i]] += below[i]
    # Groups are numbered so that all that a group leads to has lower numbers.
    under = [0] * len(nodes)
    for i in sorted(range(len(nodes)), key=group.__getitem__):
        for j in edges[i]:
            if group[j] != group[i]:
                under[group[i]] = max(under[group[i]], own[group[j]] + under[group[j]])
    return own[group[0]] + under[group[0]] if nodes else 0


def _containers(schema: object) -> tuple[list[object], list[int]]:
    """Containers, outer ones before inner ones, and the position of the one each is in."""
    nodes: list[object] = []
    parents: list[int] = []
    waiting = [(schema, 0)]
    while waiting:
        node, parent = waiting.pop()
        if isinstance(node, Mapping | list):
            children = node.values() if isinstance(node, Mapping) else node
            waiting.extend((child, len(nodes)) for child in children)
            nodes.append(node)
            parents.append(parent)
    return nodes, parents


def _cycles(edges: list[list[int]]) -> list[int]:
    """The number of each node's strongly connected component: Tarjan's algorithm."""
    unseen = -1
    seen_at = [unseen] * len(edges)
    lowest = [0] * len(edges)
    group = [unseen] * len(edges)
    n_seen = n_groups = 0
    open_nodes: list[int] = []
    for start in range(len(edges)):
        if seen_at[start] != unseen:
            continue
        path = [(start, iter(edges[start]))]
        seen_at[start] = lowest[start] = n_seen
        n_seen += 1
        open_nodes.append(start)
        while path:
            node, rest = path[-1]
            for after in rest:
                if seen_at[after] == unseen:
                    seen_at[after] = lowest[after] = n_seen
                    n_seen += 1
                    open_nodes.append(after)
                    path.append((after, iter(edges[after])))
                    break
                if group[after] == unseen:
                    lowest[node] = min(lowest[node], seen_at[after])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                if lowest[node] == seen_at[node]:
                    while group[node] == unseen:
                        group[open_nodes.pop()] = n_groups
                    n_groups += 1
    return group
