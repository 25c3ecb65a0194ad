//! The identity of an open store: what other processes that share the file know about it.

use std::cell::OnceCell;
use std::path::Path;
use std::sync::Arc;

use lockkeeper_core::{Error, Result};
use lockkeeper_host::Process;

use crate::fence_floor::FenceFloor;
use crate::wake_pipe::{Peer, PipeDir, WakePipe};

#[derive(Debug)]
pub(crate) struct StoreIdentity {
    pub peer: Peer,
    pub process: &'static Process,
    /// `None` if this container masks the kernel's boot id.
    pub boot: Option<String>,
    pub floor: FenceFloor,
    pub pipes: PipeDir,
    /// The store creates its pipe when it first waits or watches.
    pub wake_pipe: OnceCell<Arc<WakePipe>>,
}

impl StoreIdentity {
    pub fn new(database: &Path, peer: Peer, boot: Option<String>) -> Result<Self> {
        let process = Process::this().map_err(|e| {
            Error::Unavailable(format!("cannot read this process's identity from /proc: {e}"))
        })?;
        Ok(StoreIdentity {
            peer,
            process,
            boot,
            floor: FenceFloor::beside(database),
            pipes: PipeDir::beside(database),
            wake_pipe: OnceCell::new(),
        })
    }

    /// The pipe of this store. It exists before any row with this peer: other processes take a peer without a pipe for
    /// dead.
    pub fn wake_pipe(&self) -> Result<Arc<WakePipe>> {
        if let Some(wake_pipe) = self.wake_pipe.get() {
            // An idle store does not refresh the time on its pipe.
            wake_pipe.mark_alive();
            return Ok(wake_pipe.clone());
        }
        self.pipes.sweep_dead_pipes();
        let wake_pipe = Arc::new(WakePipe::open(&self.pipes, &self.peer)?);
        Ok(self.wake_pipe.get_or_init(|| wake_pipe).clone())
    }
}
