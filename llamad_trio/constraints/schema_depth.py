"""How deep llguidance may go into a JSON Schema: nesting, and references followed.

It compiles what a reference leads to where it first meets it, and only once.  In which order it
meets them we do not follow: what is counted is the most that any order may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from llamad_trio.constraints.schema_vetting import within


def depth_bound(schema: object, resolve: Callable[[str], object]) -> int:
    """The most containers that may lie within one another, what is referred to included.

    Args:
        schema: JSON data of which no container occurs twice, as `json.loads` gives it.
        resolve: what a reference leads to.
    """
    nodes = [node for node in within(schema) if isinstance(node, Mapping | list)]
    number = {id(node): i for i, node in enumerate(nodes)}
    edges: list[list[int]] = []
    inside: dict[int, int] = {}
    referred: set[int] = set()
    for i, node in enumerate(nodes):
        held = node.values() if isinstance(node, Mapping) else node
        edges.append([number[id(each)] for each in held if id(each) in number])
        inside.update(dict.fromkeys(edges[i], i))
        if isinstance(node, Mapping) and isinstance(ref := node.get("$ref"), str):
            target = number.get(id(resolve(ref)))
            if target is not None:
                edges[i].append(target)
                referred.add(target)

    depth: dict[int, int] = {}
    for group in _cycles(edges):
        # How deep each goes below itself, without references.
        below = dict.fromkeys(sorted(group, reverse=True), 1)
        for i, levels in below.items():
            if inside.get(i) in below:
                below[inside[i]] = max(below[inside[i]], 1 + levels)
        # Within a cycle one goes down from where one enters, and once from all that is referred to.
        own = max(below.values())
        if len(group) > 1 or group[0] in edges[group[0]]:
            own += sum(below[i] for i in referred.intersection(group))
        under = max((depth[j] for i in group for j in edges[i] if j not in below), default=0)
        depth.update(dict.fromkeys(group, own + under))
    return depth.get(0, 0)


def _cycles(edges: list[list[int]]) -> list[list[int]]:
    """The strongly connected components, after those they lead to: Kosaraju's algorithm."""
    back: list[list[int]] = [[] for _ in edges]
    for node, targets in enumerate(edges):
        for target in targets:
            back[target].append(node)
    seen: set[int] = set()
    order = [node for start in range(len(edges)) for node in _reached(back, start, seen)]
    seen.clear()
    groups = (list(_reached(edges, start, seen)) for start in reversed(order))
    return [group for group in groups if group]


def _reached(edges: list[list[int]], start: int, seen: set[int]) -> Iterator[int]:
    """What a node leads to and was not seen, itself included, each after all it leads to."""
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node < 0:
            yield ~node
        elif node not in seen:
            seen.add(node)
            waiting += [~node, *edges[node]]
