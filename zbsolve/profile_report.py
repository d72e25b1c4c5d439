"""What a profile says, in words: per layer, per stage, and what a schedule could win."""

from __future__ import annotations

from .profile import Profile
from .text import aligned

KINDS = ("F", "B", "W", "BW")


def table(profile: Profile) -> str:
    """The profile as text: a row a layer, equal neighbours in one, and the link."""
    rows = [("layer", *(f"{kind} µs" for kind in (*KINDS, "U")), "held until B", "until W", "parameters", "output")]
    for first, last in _runs(profile):
        layer = profile.layers[first]
        name = layer.name if first == last else f"{layer.name} … {profile.layers[last].name}"
        times = (f"{getattr(layer, kind):,.1f}" for kind in (*KINDS, "U"))
        sizes = (layer.held_until_B, layer.held_until_W, layer.parameter_bytes, layer.output_bytes)
        rows.append((name, *times, *(f"{size:,}" for size in sizes)))
    lines = [*([f"{profile.source}: no number here was measured"] if profile.source != "measured" else []), *aligned(rows)]
    fused, split = (sum(sum(getattr(c, kind) for kind in kinds) for c in profile.layers) for kinds in (("BW",), ("B", "W")))
    ratio = f"(B + W) / BW {split / fused:.3f}; " if fused else ""
    lines.append(f"{ratio}link {profile.link.latency:.0f} µs + bytes / {profile.link.bytes_per_us:.0f} per µs")
    return "\n".join(lines) + "\n"


def _runs(profile: Profile) -> list[tuple[int, int]]:
    """First and last of neighbours that differ in nothing but their names."""
    runs: list[tuple[int, int]] = []
    for i, layer in enumerate(profile.layers):
        before = profile.layers[i - 1] if i else None
        same = before is not None and all(
            getattr(layer, name) == getattr(before, name) for name in layer.__dataclass_fields__ if name != "name"
        )
        if same:
            runs[-1] = runs[-1][0], i
        else:
            runs.append((i, i))
    return runs
