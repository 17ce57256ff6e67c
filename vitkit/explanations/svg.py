"""A few SVG shapes as text. The style sheet of each drawing holds its colours, for light and dark mode."""

from __future__ import annotations

from xml.sax.saxutils import escape

STYLE = """
  .paper { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #1c2330; white-space: pre }
  .title { font-size: 17px; font-weight: 600 }
  .shape { font-family: ui-monospace, monospace; font-size: 11px; fill: #55617a }
  .box { stroke: #8a94a8; stroke-width: 1; rx: 7 } .line { stroke: #55617a; stroke-width: 1.4; fill: none }
  .tip { fill: #55617a } .square { rx: 0; stroke: none } .cut { stroke: #ffffff; stroke-width: 1.5 }
  svg { max-width: 100%; height: auto }
  .level0 { fill: #f4f6fa } .level1 { fill: #e8edf6 } .level2 { fill: #d9e2f2 } .level3 { fill: #c8d5ec }
  .embed { fill: #fbe3ee } .norm { fill: #fdf3c9 } .msa { fill: #d9efdc } .mlp { fill: #d6e8fa } .head { fill: #fde3cd }
  .token { fill: #f6d3e3 } .position { fill: #e3d7f5 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #12161d } .cut { stroke: #12161d } text { fill: #e6eaf2 }
    .shape { fill: #a7b2c6 } .line { stroke: #a7b2c6 } .tip { fill: #a7b2c6 }
    .level0 { fill: #1a202b } .level1 { fill: #222b3a } .level2 { fill: #2b374b } .level3 { fill: #35445d }
    .embed { fill: #55283d }
    .norm { fill: #4f451b } .msa { fill: #234a2a } .mlp { fill: #1f3f5f } .head { fill: #5a3a1c }
    .token { fill: #6a3350 } .position { fill: #453466 }
  }"""


def document(width: float, height: float, title: str, parts: list[str]) -> str:
    """Assemble an SVG file; screen readers read `title` aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}\n</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw a rounded rectangle; `kind` selects its colour."""
    return f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Write text at a point."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw a horizontal or vertical arrow."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    back_x, back_y, side_x, side_y = x2 - 7 * dx, y2 - 7 * dy, 4 * dy, 4 * dx
    tip = f"{x2:g},{y2:g} {back_x + side_x:g},{back_y + side_y:g} {back_x - side_x:g},{back_y - side_y:g}"
    return (
        f'<line class="line" x1="{x1:g}" y1="{y1:g}" x2="{x2 - 6 * dx:g}" y2="{y2 - 6 * dy:g}"/>'
        f'<polygon class="tip" points="{tip}"/>'
    )


def path(*points: tuple[float, float]) -> str:
    """Draw a line through points."""
    return f'<polyline class="line" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'
