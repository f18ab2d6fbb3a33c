"""Tables in plain text."""

import itertools


def grid(columns: list[tuple[str, str]], body: list[list[str]]) -> str:
    """Text in aligned columns, the first to the left; neighbours with one group title share it, centred above them."""
    widths = [max(len(title), *(len(line[k]) for line in body)) for k, (_, title) in enumerate(columns)]
    spans = [list(members) for _, members in itertools.groupby(range(len(columns)), key=lambda k: columns[k][0])]
    for span in spans:  # a group title wider than its columns widens the first of them
        room = sum(widths[k] for k in span) + len(span) - 1
        widths[span[0]] += max(0, len(columns[span[0]][0]) - room)
    lines = [[title for _, title in columns], *body]
    gap = "  "
    groups = gap.join(columns[span[0]][0].center(sum(widths[k] for k in span) + len(span) - 1) for span in spans)
    rendered = [
        gap.join(
            " ".join(line[k].ljust(widths[k]) if k == 0 else line[k].rjust(widths[k]) for k in span) for span in spans
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in [groups, *rendered])
