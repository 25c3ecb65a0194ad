#!/usr/bin/env python3
"""Makes the pictures of docs/lab.md from real runs: ./docs/images/record-lab.py PROGRAM. Look at them before you commit them."""
import pathlib, re, subprocess, sys, tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = sys.argv[1]
WIDTH, PAD, TITLE = 1040, 16, 30


def report(scenario):
    with tempfile.NamedTemporaryFile(suffix=".html") as file:
        subprocess.run([PROGRAM, "lab", "run", scenario, "--quiet", "--html", file.name], check=True)
        return pathlib.Path(file.name).read_text()


def colors(html, dark):
    """The colours of the report, for one scheme."""
    roots = re.findall(r":root \{(.*?)\}", html, re.S)
    return dict(re.findall(r"--(\w+): (#\w+)", roots[1 if dark else 0]))


def picture(html, parts, dark):
    """Pictures of the report below each other, each with its title."""
    palette, y, body = colors(html, dark), PAD, ""
    for title, svg in parts:
        height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])
        inner = re.sub(r"^<svg[^>]*>|</svg>\s*$", "", svg)
        if title:
            body += f'<text x="{PAD}" y="{y + 18}" font-size="17" font-weight="700" fill="{palette["fg"]}">{title}</text>'
            y += TITLE
        body += f'<g transform="translate({PAD} {y})">{inner}</g>'
        y += height + PAD
    body = re.sub(r"var\(--(\w+)\)", lambda name: palette[name[1]], body)
    size = f'viewBox="0 0 {WIDTH + 2 * PAD} {y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12">'
    return f'{head}<rect width="100%" height="100%" rx="10" fill="{palette["card"]}"/>{body}</svg>\n'


def make(scenario, name, wanted):
    html = report(scenario)
    sections = re.findall(r"<section.*?</section>", html, re.S)
    titled = [((re.search(r"<h2>(.*?)</h2>", s) or ["", ""])[1], re.search(r"<svg.*?</svg>", s, re.S)) for s in sections]
    parts = wanted([(title, svg[0]) for title, svg in titled if svg])
    legend = re.search(r'<svg class="legend".*?</svg>', html, re.S)[0]
    for scheme, dark in [("light", False), ("dark", True)]:
        shown = parts if scenario == "cas-or-lock" else [*parts, ("", legend)]
        (ROOT / f"docs/images/lab-{name}-{scheme}.svg").write_text(picture(html, shown, dark))


make("pause", "pause", lambda parts: parts)
make("cas-or-lock", "cas", lambda parts: parts[-2:])
