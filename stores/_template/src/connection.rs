//! The connection to the backend: connecting, reconnecting, and the requests in flight.

use crate::config::Options;
use crate::error::Failure;

/// The connection of a store. Fill in: the driver's client, made when it is first used and made again when it broke. `store-kit` has parts
/// for it: `InFlight` notices a silent server, `IoThread` keeps the sockets off the caller's runtime.
#[derive(Clone, Debug)]
pub struct TemplateConnection {
    #[allow(dead_code, reason = "nothing reaches a backend yet; remove this line with the first statement")]
    servers: Vec<String>,
}

impl TemplateConnection {
    /// The connection to one of the servers of `options`.
    pub fn new(options: &Options) -> Self {
        TemplateConnection { servers: options.servers.clone() }
    }

    /// Sends one statement and returns the reply. Fill in: a time limit for every request. A request that was sent and has no reply
    /// is [`Failure::NoReply`], also if the connection broke: the backend may have applied it.
    pub async fn send(&self, statement: &'static str) -> Result<Vec<u8>, Failure> {
        Err(Failure::NotWritten(statement))
    }
}
