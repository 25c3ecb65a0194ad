//! Websockets through the gate, with a server and a client that are not ours.

use std::process::Command;

use lockkeeper_testkit::servers::demand;
use rustix::process::Signal;

use super::common::*;
use super::tools::*;

const SERVER: &str = r#"
import asyncio, websockets
async def echo(ws, path=None):
    async for message in ws:
        await ws.send(message)
async def main():
    async with websockets.serve(echo, "127.0.0.1", 0, max_size=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Future()
asyncio.run(main())
"#;

// Sends what it reads, prints what comes back, and says when the other end closes.
const CLIENT: &str = r#"
import asyncio, sys, websockets
async def main():
    headers = {"Lock-Fence": sys.argv[2]} if len(sys.argv) > 2 else {}
    async with websockets.connect(sys.argv[1], extra_headers=headers, max_size=None) as ws:
        big = "x" * 3_000_000
        await ws.send(big)
        assert await ws.recv() == big
        print("open", flush=True)
        try:
            for n in range(3):
                await ws.send(str(n))
                print(await ws.recv(), flush=True)
            await ws.wait_closed()
        finally:
            print("closed", flush=True)
asyncio.run(main())
"#;

fn python(program: &str, args: &[&str]) -> Running {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", program]).args(args);
    Running::new(command)
}

fn opened(client: &mut Running) {
    for line in ["open", "0", "1", "2"] {
        assert_eq!(client.line(), line);
    }
}

#[test]
fn a_websocket_is_passed_through_and_closed_when_a_newer_fence_comes() {
    let package = std::path::Path::new("/usr/lib/python3/dist-packages/websockets/__init__.py");
    let Ok(()) = demand("websockets", package.is_file(), "the Debian package python3-websockets") else {
        return;
    };
    let place = Place::new("gate_websocket");
    let mut server = python(SERVER, &[]);
    let upstream = format!("http://127.0.0.1:{}", server.line());
    let gate = Gate::start(&place, &upstream, "--drain 200ms");
    let url = format!("ws://{}/chat", gate.addr);
    let (mut free, mut five) = (python(CLIENT, &[&url]), python(CLIENT, &[&url, "5"]));
    opened(&mut free);
    opened(&mut five);
    assert_eq!(gate.metric("tunnels"), 2);
    let mut six = python(CLIENT, &[&url, "6"]);
    opened(&mut six);
    assert_eq!(five.line(), "closed", "its fence is old");
    until(|| gate.metric("tunnels") == 2);
    let mut late = python(CLIENT, &[&url, "5"]);
    assert_eq!(late.line(), "", "a websocket is refused like everything else");
    // Nothing ends by itself: after the time to drain they are cut.
    gate.signal(Signal::TERM);
    let (ended, said) = gate.end();
    assert!(ended == 74 && said.last().unwrap().contains("2 requests"), "{ended} {said:?}");
    assert_eq!((free.line(), six.line()), ("closed".into(), "closed".into()));
    server.child.kill().unwrap();
}

/// `Upgrade: h2c` was passed on like any other: a connection to the service on which no fence is checked.
#[test]
fn nothing_but_a_websocket_is_passed_through_unseen() {
    let place = Place::new("gate_h2c");
    let gate = Gate::start(&place, &format!("http://{}", switching("h2c")), "");
    let request = |protocol: &str, wanted: &str| {
        let mut wire = Wire::to(gate.addr);
        wire.say(&format!(
            "GET /a HTTP/1.1\r\nHost: a\r\nConnection: upgrade, http2-settings\r\nUpgrade: {protocol}\r\n\
             HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"
        ));
        wire.hear(wanted).to_lowercase()
    };
    let seen = request("h2c", "heard");
    assert!(
        seen.starts_with("http/1.1 200") && !seen.contains("upgrade") && !seen.contains("settings"),
        "{seen}"
    );
    // Nor may the service switch to a protocol that the client did not ask for.
    assert!(request("websocket", "fence:unknown").starts_with("http/1.1 504"));
}

/// A connection gave its room back when it became a websocket, and there could be more of those than files.
#[test]
fn a_websocket_is_one_of_the_connections_that_there_is_room_for() {
    let place = Place::new("gate_room");
    let options = "--connections 1";
    let gate = Gate::start(&place, &format!("http://{}", switching("websocket")), options);
    let mut open = Wire::to(gate.addr);
    open.say("GET /a HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n");
    open.hear("101 Switching Protocols");
    // Its connection is over, as far as HTTP goes.
    until(|| gate.metric("connections") == 0 && gate.metric("tunnels") == 1);
    let mut next = Wire::to(gate.addr);
    next.say("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    next.0.set_read_timeout(Some(std::time::Duration::from_millis(300))).unwrap();
    let early = next.0.peek(&mut [0]);
    assert!(early.is_err(), "it was served while there was no room");
    next.0.set_read_timeout(Some(LONG)).unwrap();
    drop(open);
    next.hear("heard");
}
