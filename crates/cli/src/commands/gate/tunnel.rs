//! Connections that became websockets: bytes are passed on both ways, unseen.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use lockkeeper_fenced::http::Admission;
use tokio::io::copy_bidirectional;

use super::forward::Client;
use super::metrics::{Metrics, One};

/// Both ends, and the fence that it was opened with, if there was one.
pub struct Tunnel {
    pub client: OnUpgrade,
    pub service: OnUpgrade,
    /// It takes up the room of a connection until it is closed.
    pub whose: Arc<Client>,
    pub admission: Option<Admission>,
    /// It counts as under way until it is closed.
    pub under_way: One,
}

impl Tunnel {
    /// Passes on until one end closes, or until somebody with a newer fence comes, or may come to another gate: then it is cut.
    pub async fn run(self, metrics: Arc<Metrics>) {
        let _open = metrics.tunnels.one();
        let (Ok(client), Ok(service)) = tokio::join!(self.client, self.service) else { return };
        let (mut client, mut service) = (TokioIo::new(client), TokioIo::new(service));
        let overtaken = async {
            match &self.admission {
                Some(admission) => admission.overtaken().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // An end that breaks off is an end like any other.
            _ = copy_bidirectional(&mut client, &mut service) => {}
            () = overtaken => tracing::info!("a newer fence came, or may come elsewhere: a websocket of an older one is closed"),
        }
        drop((client, service));
        drop((self.under_way, self.whose));
    }
}
