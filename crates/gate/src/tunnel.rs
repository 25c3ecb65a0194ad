//! Websockets: after the upgrade the gate copies bytes in both directions without reading them.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use lockkeeper_fenced::http::WriteAdmission;
use tokio::io::copy_bidirectional;

use crate::forward::ClientConnection;
use crate::metrics::{GateMetrics, GaugeGuard};

/// Both ends of a websocket, and the admission of the fence that the client opened it with, if it sent one.
pub struct Tunnel {
    pub client: OnUpgrade,
    pub service: OnUpgrade,
    /// Holds the permit of the client's connection until the websocket is closed.
    pub connection: Arc<ClientConnection>,
    pub admission: Option<WriteAdmission>,
    /// Counts the websocket as a request in flight until it is closed.
    pub in_flight: GaugeGuard,
}

impl Tunnel {
    /// Copies until one end closes. Closes both ends when a request with a newer fence arrives, or when this gate loses the
    /// marks, because then another gate may forward a newer fence.
    pub async fn run(self, metrics: Arc<GateMetrics>) {
        let _open = metrics.tunnels.increment();
        let (Ok(client), Ok(service)) = tokio::join!(self.client, self.service) else { return };
        let (mut client, mut service) = (TokioIo::new(client), TokioIo::new(service));
        let overtaken = async {
            match &self.admission {
                Some(admission) => admission.overtaken().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // An error of one end ends the websocket like a close.
            _ = copy_bidirectional(&mut client, &mut service) => {}
            () = overtaken => tracing::info!(
                "websocket closed: a request with a newer fence arrived, or another gate may have one; the client may open it again with a newer fence"
            ),
        }
        drop((client, service));
        drop((self.in_flight, self.connection));
    }
}
