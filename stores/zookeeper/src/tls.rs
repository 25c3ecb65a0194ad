//! TLS for `zks://`, for the client library and for the connections of the store itself.

use std::fmt::Display;
use std::io;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lockkeeper_core::{Error, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use zookeeper_client::{self as zk, Client, TlsOptions};

use crate::error::RefusalCause;

/// TLS settings: the certificates to trust, and the client's own. Verification cannot be switched off.
#[derive(Clone)]
pub struct ZooKeeperTls {
    /// For the client library.
    options: TlsOptions,
    /// The same for the store's own connections.
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for ZooKeeperTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ZooKeeperTls")
    }
}

fn unusable(what: &str, why: impl Display) -> Error {
    Error::invalid(format!("{what} cannot be used: {why}"))
}

impl ZooKeeperTls {
    /// Trusts the CAs in the PEM file `ca`, with the revocation lists in it, or the CAs of the machine. Presents
    /// `identity`, the PEM files of a certificate and its key, to servers that request one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a file cannot be read or used.
    pub fn new(ca: Option<&str>, identity: Option<(&str, &str)>) -> Result<Self> {
        let (source, ca_pem) = match ca {
            Some(path) => (path, read(path)?),
            None => ("the CA list of this machine", system_roots()),
        };
        let config = client_config(source, &ca_pem)?;
        let options = TlsOptions::new().with_pem_ca(&ca_pem).map_err(|why| unusable(source, why))?;
        let Some((cert, key)) = identity else {
            return Ok(ZooKeeperTls { options, config: Arc::new(config.with_no_client_auth()) });
        };
        let (chain, private) = (read(cert)?, read(key)?);
        let options = options.with_pem_identity(&chain, &private).map_err(|why| unusable(cert, why))?;
        let chain = certificates(cert, &chain)?;
        let private = PrivateKeyDer::from_pem_slice(private.as_bytes()).map_err(|why| unusable(key, why))?;
        let config = config.with_client_auth_cert(chain, private).map_err(|why| unusable(cert, why))?;
        Ok(ZooKeeperTls { options, config: Arc::new(config) })
    }

    /// Rejects a host that no certificate can contain. The client library panics on such a host, and takes a `tcp://`
    /// before it as a request not to encrypt.
    pub(crate) fn check(&self, host: &str) -> Result<()> {
        match ServerName::try_from(host) {
            Ok(_) => Ok(()),
            Err(_) => {
                Err(Error::invalid(format!("{host:?} is not a host name that a certificate can contain")))
            }
        }
    }

    pub(crate) async fn connect(&self, connector: zk::Connector, servers: &str) -> Result<Client, zk::Error> {
        // The client library uses the crypto provider of the process, and panics if two are built in and the program
        // has chosen none: this crate has ring, and the library brings aws-lc. A choice that the program has made
        // before stays.
        _ = rustls::crypto::ring::default_provider().install_default();
        connector.with_tls(self.options.clone()).secure_connect(servers).await
    }

    pub(crate) async fn wrap(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(self.config.clone()).connect(name, stream).await
    }

    /// The part of a connection error about certificates. `None`: there is none.
    pub(crate) fn classify(&self, error: &io::Error) -> Option<RefusalCause> {
        use rustls::Error::*;
        let inner = error.get_ref()?.downcast_ref::<rustls::Error>()?;
        Some(match inner {
            InvalidCertificate(why) => RefusalCause::Untrusted(format!("{inner}. {}", advice(why))),
            AlertReceived(alert) if is_certificate_alert(*alert) => {
                let shown = self.config.client_auth_cert_resolver.has_certs();
                RefusalCause::Untrusted(match shown {
                    true => format!("it rejects our certificate ({alert:?})"),
                    false => format!(
                        "it rejects the connection ({alert:?}). If it requires a client certificate, add ?cert=FILE&key=FILE"
                    ),
                })
            }
            InvalidMessage(_) => RefusalCause::NotTls,
            _ => RefusalCause::Other(inner.to_string()),
        })
    }
}

fn advice(why: &CertificateError) -> &'static str {
    use CertificateError::*;
    match why {
        UnknownIssuer | BadSignature => "Name the CA that issued it: ?ca=FILE",
        NotValidForName | NotValidForNameContext { .. } => "Use a name from the certificate in the address",
        Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. } => {
            "Give the server another one, or correct the clock of this machine"
        }
        _ => "Give the server another one",
    }
}

fn is_certificate_alert(alert: AlertDescription) -> bool {
    use AlertDescription::*;
    matches!(
        alert,
        BadCertificate
            | UnsupportedCertificate
            | CertificateRevoked
            | CertificateExpired
            | CertificateUnknown
            | UnknownCA
            | AccessDenied
            | CertificateRequired
            | HandshakeFailure
    )
}

fn read(path: &str) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|why| unusable(path, why))?;
    // There may be other text between the certificates.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The CAs of the machine as PEM, which the client library needs.
fn system_roots() -> String {
    let pem = |cert: CertificateDer<'_>| {
        format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(cert))
    };
    rustls_native_certs::load_native_certs().certs.into_iter().map(pem).collect()
}

fn certificates(source: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>> {
    let list = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    match list.map_err(|why| unusable(source, why))? {
        none if none.is_empty() => Err(unusable(source, "it contains no certificate")),
        list => Ok(list),
    }
}

type TlsConfigBuilder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

fn client_config(source: &str, pem: &str) -> Result<TlsConfigBuilder> {
    let mut roots = RootCertStore::empty();
    // Some of a machine's certificates may not be parsable.
    if roots.add_parsable_certificates(certificates(source, pem)?).0 == 0 {
        return Err(unusable(source, "it contains no certificate that can be parsed"));
    }
    let revoked = CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    // The provider is named here, so that another library with another provider does not interfere.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .with_crls(revoked.map_err(|why| unusable(source, why))?)
        .build()
        .map_err(|why| unusable(source, why))?;
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().map_err(|why| unusable("TLS", why))?;
    Ok(builder.with_webpki_verifier(verifier))
}
