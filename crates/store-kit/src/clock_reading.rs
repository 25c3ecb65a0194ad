//! Reads the clock of a server, with the bounds of the moment at which the server read it.

use std::future::Future;
use std::time::Duration;

use lockkeeper_core::{ClockReading, WallTime};
use lockkeeper_host::Clock;

/// Reads the wall clock of `server` by the call `read`. `resolution` is the step of the server's clock.
///
/// # Errors
/// The errors of `read`.
pub async fn read_clock<E>(
    clock: &dyn Clock,
    server: impl Into<String>,
    resolution: Duration,
    read: impl Future<Output = Result<WallTime, E>>,
) -> Result<ClockReading, E> {
    let sent = clock.now();
    let time = read.await?;
    let (received, local) = (clock.now(), clock.wall());
    Ok(ClockReading { server: server.into(), time, resolution, sent, received, local })
}
