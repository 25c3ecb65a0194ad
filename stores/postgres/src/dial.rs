//! Connecting to the server: sockets and login.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};
use tokio_postgres::config::SslMode;
use tokio_postgres::{Client, Config, NoTls};

use crate::config::{Options, ServerAddr};
use crate::error::Failure;
use crate::shared_connection::SharedConnection;

/// Opens a connection of your own to the database of an address, as the store does: TLS, keep-alive, a time-out for connecting. It runs
/// on the runtime of the caller. Nothing is created in the database.
///
/// # Errors
/// [`lockkeeper_core::Error::Unavailable`] or [`lockkeeper_core::Error::Denied`], with what to do.
pub async fn connect_to(options: &Options) -> lockkeeper_core::Result<Client> {
    let (client, connection) = log_in_within_timeout(options).await?;
    tokio::spawn(async move { while connection.next().await.is_some() {} });
    Ok(client)
}

pub(crate) async fn log_in_within_timeout(
    options: &Options,
) -> Result<(Client, Arc<SharedConnection>), Failure> {
    let Options { server, timeout, .. } = options;
    let login = tokio::time::timeout(*timeout, log_in(options)).await;
    login.unwrap_or_else(|_| {
        Err(Failure::NotSent(format!("no PostgreSQL at {server}: it did not answer within {timeout:?}")))
    })
}

async fn log_in(options: &Options) -> Result<(Client, Arc<SharedConnection>), Failure> {
    let server = options.server.to_string();
    let rejected = |error: tokio_postgres::Error| Failure::while_connecting(&error, &server);
    let mut config = Config::new();
    config.user(&options.user).dbname(&options.database).application_name("lockkeeper");
    config.ssl_mode(if options.tls.is_some() { SslMode::Require } else { SslMode::Disable });
    if let Some(password) = &options.password {
        config.password(password.expose());
    }
    match (PgSocket::connect(&options.server).await?, &options.tls, &options.server) {
        (PgSocket::Unix(stream), ..) => {
            let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(rejected)?;
            Ok((client, SharedConnection::new(connection)))
        }
        (PgSocket::Tcp(stream), Some(tls), ServerAddr::Tcp(host, _)) => {
            let (client, connection) =
                config.connect_raw(stream, tls.handshake(host)).await.map_err(rejected)?;
            Ok((client, SharedConnection::new(connection)))
        }
        (PgSocket::Tcp(stream), ..) => {
            let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(rejected)?;
            Ok((client, SharedConnection::new(connection)))
        }
    }
}

pub(crate) enum PgSocket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl PgSocket {
    pub async fn connect(server: &ServerAddr) -> Result<PgSocket, Failure> {
        let unreachable = |error: io::Error| Failure::NotSent(format!("no PostgreSQL at {server}: {error}"));
        match server {
            ServerAddr::Unix(..) => {
                Ok(PgSocket::Unix(UnixStream::connect(server.to_string()).await.map_err(unreachable)?))
            }
            ServerAddr::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(unreachable)?;
                stream.set_nodelay(true).map_err(unreachable)?;
                // Keep-alive detects a vanished peer also while no request is in flight.
                let keep = socket2::TcpKeepalive::new()
                    .with_time(Duration::from_secs(10))
                    .with_interval(Duration::from_secs(5));
                socket2::SockRef::from(&stream).set_tcp_keepalive(&keep).map_err(unreachable)?;
                Ok(PgSocket::Tcp(stream))
            }
        }
    }
}
