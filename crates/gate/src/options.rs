//! The limits and time-outs of a gate, and how many connections the process may open.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::resource::ResourceSelector;

/// Limits and time-outs of a gate.
#[derive(Clone, Debug)]
pub struct GateOptions {
    /// How long a request may make no progress, in either direction, until the response begins; then 504.
    pub timeout: Duration,
    /// How long connecting to the service may take; then 502.
    pub connect_timeout: Duration,
    /// How long a response, its reader, or a connection between two requests may make no progress.
    pub idle_timeout: Duration,
    /// How long the rest of a request's body may take once a request with a newer fence waits for it.
    pub overtaken_grace: Duration,
    /// How long requests in flight may take after the first call to shut down, before the gate cuts them off.
    pub drain_timeout: Duration,
    /// The most client connections at a time. Further clients wait in the kernel's accept queue.
    pub max_connections: usize,
    /// Which part of a request names the resource: the gate refuses a request that the service could take for one to another.
    pub resource: ResourceSelector,
}

/// Raises the limit of open files of this process to its maximum, and returns it.
pub fn raise_file_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    // None means that there is no limit.
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}

/// How many client connections fit into `files` open files: each may need a second one, to the service.
pub fn connections_for(files: u64) -> usize {
    usize::try_from(files.saturating_sub(64) / 2).unwrap_or(usize::MAX).clamp(1, 1 << 20)
}
