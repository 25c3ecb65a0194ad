#!/usr/bin/env python3
"""Records terminal-light.svg and terminal-dark.svg: real output of the lockkeeper command, as text in an SVG.

Run as root (each holder gets a host name of its own, in a UTS namespace), with redis-server installed and the command built:

    cargo build --bin lockkeeper && ./docs/images/record.py target/debug/lockkeeper
"""
import html, os, pathlib, socket, subprocess, sys, tempfile, time

PROGRAM = pathlib.Path(sys.argv[1]).resolve()
HERE = pathlib.Path(__file__).parent
THEMES = {  # background, border, text, prompt, comment
    "light": ("#ffffff", "#d0d7de", "#1f2328", "#1a7f37", "#656d76"),
    "dark": ("#0d1117", "#30363d", "#e6edf3", "#3fb950", "#8d96a0"),
}
WIDTH, HEIGHT, PAD = 8.4, 20, 18  # of a character, of a line, around all of it


def record():
    """Three holders and a waiter on four hosts; then the commands that an operator types. Returns lines as (kind, text)."""
    with tempfile.TemporaryDirectory() as place:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = f"--port {port} --dir {place} --appendonly yes --appendfsync always --maxmemory-policy noeviction"
        running = [subprocess.Popen(["redis-server", *options.split()], stdout=subprocess.DEVNULL)]
        while subprocess.run(["redis-cli", "-p", str(port), "ping"], capture_output=True, text=True).stdout != "PONG\n":
            time.sleep(0.05)
        env = dict(os.environ, LOCKKEEPER_STORE=f"redis://127.0.0.1:{port}", PATH=f"{PROGRAM.parent}:{os.environ['PATH']}")

        def start(host, script, *words):
            path = pathlib.Path(place, script)
            path.write_text("#!/bin/sh\nexec sleep 600\n")
            path.chmod(0o755)
            command = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec lockkeeper run "$@"', host, *words, "--", str(path)]
            running.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True))
            time.sleep(0.7)

        start("web2", "deploy.sh", "deploy/web")
        start("db7", "settle.sh", "nightly-settlement")
        start("db3", "settle.sh", "nightly-settlement")
        start("gpu1", "train.py", "gpu", "--permits", "4")
        time.sleep(14)
        lines = []
        for command in ["lockkeeper ls", "lockkeeper show nightly-settlement", 'lockkeeper break nightly-settlement --reason "db7 is drained"']:
            lines.append(("prompt", command))
            done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
            lines += [("text", line) for line in (done.stdout + done.stderr).splitlines()]
            lines.append(("text", ""))
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            process.wait()
    return lines[:-1]


def draw(lines, theme):
    background, border, text, prompt, comment = THEMES[theme]
    columns = max(len(line) + (2 if kind == "prompt" else 0) for kind, line in lines)
    width, height = round(columns * WIDTH + 2 * PAD), len(lines) * HEIGHT + 2 * PAD
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"',
        '  font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14">',
        "<title>lockkeeper ls lists the locks, lockkeeper show shows one of them, lockkeeper break takes it away</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{background}" stroke="{border}"/>',
    ]
    for row, (kind, line) in enumerate(lines):
        y = PAD + row * HEIGHT + 15
        x = PAD
        if kind == "prompt":
            out.append(f'<text x="{x}" y="{y}" fill="{prompt}">$</text>')
            x = round(PAD + 2 * WIDTH, 1)
        if line:
            fill = comment if line.lstrip().startswith(("harm:", "risk:", "hint:")) else text
            weight = ' font-weight="600"' if kind == "prompt" else ""
            length = round(len(line) * WIDTH, 1)
            out.append(f'<text x="{x}" y="{y}" fill="{fill}"{weight} xml:space="preserve" textLength="{length}">{html.escape(line)}</text>')
    (HERE / f"terminal-{theme}.svg").write_text("\n".join(out + ["</svg>"]) + "\n")


recorded = record()
for theme in THEMES:
    draw(recorded, theme)
print("\n".join(("$ " if kind == "prompt" else "") + line for kind, line in recorded))
