# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who holds and sends what in ulysses 2 × ring 2, as a picture: what each rank has before, in and after a forward, and its messages.

    PYTHONPATH=python python3 examples/python/who_sends_what.py > docs/mesh.svg

Nothing is drawn from memory: tokens and heads are those of a plan, arrows the messages of its schedules.
"""

import cpattn
from cpattn.schedule import OpKind

WORLD, TOKENS, HEADS = 4, 16, 4
# Pixels of a token, of a head, of a rank's row, of a column, and of the space for arrows.
CELL, HEIGHT, ROW, WIDTH, GAP = 11, 11, 92, 16 * 11, 128
LEFT, TOP = 74, 70
OWN, SHARED, RECEIVED = "#3465a4", "#73a0d0", "#e08a1e"

plan = cpattn.Plan(
    [0, TOKENS], HEADS, 8, kv_heads=2, world=WORLD, ulysses=2, ring=2, layout="zigzag_pack", dtype="bf16"
)
tokens = [list(plan.tokens("q", rank)) for rank in range(WORLD)]
shares = [plan.share(rank) for rank in range(WORLD)]
exchanges = [[op for op in plan.schedule(rank, "forward").ops if op.kind == OpKind.EXCHANGE] for rank in range(WORLD)]
# Of the share's tokens: those of all ranks with the same place on the ring, in the order of the batch.
share_tokens = [
    sorted(t for other in range(WORLD) if shares[other].ring == shares[rank].ring for t in tokens[other])
    for rank in range(WORLD)
]


def cells(column, rank, of, heads, color):
    """The tokens and heads that a rank has, in the grid of all."""
    x, y = LEFT + column * (WIDTH + GAP), TOP + rank * ROW
    yield f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEADS * HEIGHT}" fill="#f0f0f0"/>'
    for token in of:
        for head in heads:
            yield f'<rect x="{x + token * CELL}" y="{y + head * HEIGHT}" width="{CELL - 1}" height="{HEIGHT - 1}" fill="{color(token)}"/>'


def arrows(number, column):
    """The messages of an exchange: from the sender's row to the receiver's, with all bytes between the two."""
    for rank in range(WORLD):
        sent = {}
        for message in exchanges[rank][number].messages:
            if message.send:
                sent[message.peer] = sent.get(message.peer, 0) + message.bytes
        for peer, size in sent.items():
            x = LEFT + column * (WIDTH + GAP) + WIDTH
            y, to = (TOP + r * ROW + HEADS * HEIGHT // 2 for r in (rank, peer))
            yield f'<line x1="{x + 6}" y1="{y}" x2="{x + GAP - 10}" y2="{to}" stroke="#555" marker-end="url(#end)"/>'
            # On the side of the sender that the line leaves free.
            yield f'<text x="{x + 10}" y="{y + (15 if to < y else -7)}" fill="#555">{size} bytes to {peer}</text>'


def picture():
    width, height = LEFT + 4 * WIDTH + 3 * GAP + 20, TOP + WORLD * ROW + 14
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    yield '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    yield '<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>'
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    title = f"{TOKENS} tokens (columns), {HEADS} q heads (rows), causal; ulysses 2 × ring 2, zigzag over the pack, bf16, forward"
    yield f'<text x="{LEFT}" y="20" font-size="13">{title}</text>'
    names = [
        "before: its tokens, all heads",
        "in the run: its share, its heads",
        "from others: k and v that it reads",
        "after: o of its tokens, all heads",
    ]
    for column, name in enumerate(names):
        yield f'<text x="{LEFT + column * (WIDTH + GAP)}" y="{TOP - 14}">{name}</text>'
    for column, name in enumerate(["all-to-all", "ring, beside step 0", "all-to-all"]):
        yield f'<text x="{LEFT + column * (WIDTH + GAP) + WIDTH + 12}" y="{TOP - 14}" fill="#555" font-weight="bold">{name}</text>'
    for rank in range(WORLD):
        share = shares[rank]
        yield f'<text x="8" y="{TOP + rank * ROW + 27}" font-size="13">rank {rank}</text>'
        heads = range(share.q_head_begin, share.q_head_end)
        own = set(tokens[rank])
        yield from cells(0, rank, tokens[rank], range(HEADS), lambda _: OWN)
        yield from cells(1, rank, share_tokens[rank], heads, lambda token, own=own: OWN if token in own else SHARED)
        # What the peer sends of its share: rows of its k, seen from the sender.
        received = []
        for peer in range(WORLD):
            for message in exchanges[peer][1].messages:
                if message.send and message.peer == rank:
                    received += share_tokens[peer][message.view.row : message.view.row + message.view.rows]
        yield from cells(2, rank, sorted(set(received)), heads, lambda _: RECEIVED)
        yield from cells(3, rank, tokens[rank], range(HEADS), lambda _: OWN)
    for number in range(3):
        yield from arrows(number, number)
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(picture()))
