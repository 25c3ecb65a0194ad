//! TLS: the certificates to trust and to present.

use std::io;
use std::sync::Arc;

use lockkeeper_core::{Error, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The TLS settings of a connection. There is no option to trust any certificate.
#[derive(Clone)]
pub struct Tls(Arc<ClientConfig>);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Believes those whom the file `ca` vouches for (PEM), or else those whom the machine believes; shows `identity`
    /// (a certificate and its key, PEM files) to servers that ask for it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a file cannot be read or used.
    pub fn new(ca: Option<&str>, identity: Option<(&str, &str)>) -> Result<Self> {
        let bad =
            |what: &str, why: &dyn std::fmt::Display| Error::invalid(format!("{what} cannot be used: {why}"));
        let mut roots = RootCertStore::empty();
        match ca {
            Some(path) => {
                let list = CertificateDer::pem_file_iter(path).map_err(|why| bad(path, &why))?;
                for one in list {
                    roots.add(one.map_err(|why| bad(path, &why))?).map_err(|why| bad(path, &why))?;
                }
                if roots.is_empty() {
                    return Err(bad(path, &"there is no certificate in it"));
                }
            }
            None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
        }
        // ReportedPrimary here, so that another library of the program that brings another provider is no trouble.
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|why| bad("TLS", &why))?
            .with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = CertificateDer::pem_file_iter(cert).map_err(|why| bad(cert, &why))?;
                let chain = chain.collect::<Result<Vec<_>, _>>().map_err(|why| bad(cert, &why))?;
                let private = PrivateKeyDer::from_pem_file(key).map_err(|why| bad(key, &why))?;
                config.with_client_auth_cert(chain, private).map_err(|why| bad(cert, &why))?
            }
        };
        Ok(Tls(Arc::new(config)))
    }

    pub(crate) async fn wrap(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(self.0.clone()).connect(name, stream).await
    }
}
