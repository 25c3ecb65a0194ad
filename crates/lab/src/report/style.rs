//! The colours and the layout of the report. The colours are those of Okabe and Ito, which people with any colour vision tell apart.

/// The colours, light and dark. The pictures of the documentation use them as well.
pub const COLORS: &str = "\
:root { --bg: #ffffff; --card: #f6f7f9; --fg: #1b1f24; --dim: #59636e; --line: #d1d9e0; --holds: #0072b2; --onholds: #ffffff;
 --waits: #c3ccd6; --stopped: #e69f00; --onstopped: #1b1f24; --bad: #c2410c; --badbg: #fff1e8; --good: #00775a; --fault: #8f5f00; }
@media (prefers-color-scheme: dark) {
 :root { --bg: #0d1117; --card: #161b22; --fg: #e6edf3; --dim: #9198a1; --line: #30363d; --holds: #3b9fdc; --onholds: #0d1117;
 --waits: #414b57; --stopped: #e6a817; --onstopped: #0d1117; --bad: #ff8a4c; --badbg: #33190b; --good: #3fc49a; --fault: #f0c35a; } }
";

/// The layout of the page, and of the text in its pictures.
pub const PAGE: &str = "\
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }
article { margin: 0 0 72px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 8px; }
h1 .name { color: var(--holds); }
h2 { font-size: 19px; margin: 0; }
p { margin: 4px 0 10px; max-width: 78ch; }
.conclusion { font-size: 19px; font-weight: 600; border-left: 4px solid var(--holds); padding-left: 12px; }
.facts, .watch, summary { color: var(--dim); font-size: 14px; }
.verdict { font-weight: 700; border: 1px solid; border-radius: 10px; padding: 0 8px; margin-right: 6px; }
.verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; margin: 16px 0; }
section.hurt { border-color: var(--bad); border-width: 2px; }
.counts { list-style: none; display: flex; flex-wrap: wrap; gap: 8px; padding: 0; margin: 8px 0; }
.counts li { border: 1px solid var(--line); border-radius: 8px; padding: 2px 12px; background: var(--bg); }
.counts b { font-size: 20px; margin-right: 4px; }
.counts .bad { color: var(--bad); border-color: var(--bad); background: var(--badbg); }
.counts .good b { color: var(--good); }
.legend { display: block; margin: 0 0 24px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; font-size: 13px; } td { padding: 1px 12px 1px 0; vertical-align: top; }
code { font: 13px ui-monospace, monospace; }
";
