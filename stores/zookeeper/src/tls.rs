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

use crate::refusal::Reason;

/// How to encrypt, and whom to believe. There is no way to believe everybody.
#[derive(Clone)]
pub struct Tls {
    /// For the client underneath.
    options: TlsOptions,
    /// The same for connections of our own.
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

fn bad(what: &str, why: impl Display) -> Error {
    Error::invalid(format!("{what} cannot be used: {why}"))
}

impl Tls {
    /// Believes those whom the file `ca` vouches for (PEM; the revocation lists in it count), or else those whom the machine
    /// believes; shows `identity` (a certificate and its key, PEM files) to servers that ask for it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a file cannot be read or used.
    pub fn new(ca: Option<&str>, identity: Option<(&str, &str)>) -> Result<Self> {
        let (place, vouchers) = match ca {
            Some(path) => (path, read(path)?),
            None => ("the list of CAs of this machine", machine()),
        };
        let config = believe(place, &vouchers)?;
        let options = TlsOptions::new().with_pem_ca(&vouchers).map_err(|why| bad(place, why))?;
        let Some((cert, key)) = identity else {
            return Ok(Tls { options, config: Arc::new(config.with_no_client_auth()) });
        };
        let (chain, private) = (read(cert)?, read(key)?);
        let options = options.with_pem_identity(&chain, &private).map_err(|why| bad(cert, why))?;
        let chain = certificates(cert, &chain)?;
        let private = PrivateKeyDer::from_pem_slice(private.as_bytes()).map_err(|why| bad(key, why))?;
        let config = config.with_client_auth_cert(chain, private).map_err(|why| bad(cert, why))?;
        Ok(Tls { options, config: Arc::new(config) })
    }

    /// Refuses a host that no certificate can name. The client underneath panics over one, and takes `tcp://` before one
    /// for a wish not to encrypt.
    pub(crate) fn check(&self, host: &str) -> Result<()> {
        match ServerName::try_from(host) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::invalid(format!("{host:?} is no name that a certificate can be for"))),
        }
    }

    pub(crate) async fn connect(&self, connector: zk::Connector, servers: &str) -> Result<Client, zk::Error> {
        // The client takes the provider of the process, and panics where two are built in and nobody has chosen: ring is ours,
        // and the client itself brings aws-lc. Whoever has chosen before us is right.
        _ = rustls::crypto::ring::default_provider().install_default();
        connector.with_tls(self.options.clone()).secure_connect(servers).await
    }

    pub(crate) async fn wrap(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(self.config.clone()).connect(name, stream).await
    }

    /// What an error of a connection says about those who do not believe each other. `None`: nothing.
    pub(crate) fn judge(&self, error: &io::Error) -> Option<Reason> {
        use rustls::Error::*;
        let inner = error.get_ref()?.downcast_ref::<rustls::Error>()?;
        Some(match inner {
            InvalidCertificate(why) => Reason::Barred(format!("{inner}. {}", advice(why))),
            AlertReceived(alert) if is_of_a_certificate(*alert) => {
                let shown = self.config.client_auth_cert_resolver.has_certs();
                Reason::Barred(match shown {
                    true => format!("it does not take our certificate ({alert:?})"),
                    false => format!(
                        "it does not let us in ({alert:?}). If it wants a certificate, name yours: ?cert=FILE&key=FILE"
                    ),
                })
            }
            InvalidMessage(_) => Reason::NotTls,
            _ => Reason::Other(inner.to_string()),
        })
    }
}

fn advice(why: &CertificateError) -> &'static str {
    use CertificateError::*;
    match why {
        UnknownIssuer | BadSignature => "Name the CA that vouches for it: ?ca=FILE",
        NotValidForName | NotValidForNameContext { .. } => "Use a name from the certificate in the address",
        Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. } => {
            "Give the server another one, or correct the clock of this machine"
        }
        _ => "Give the server another one",
    }
}

fn is_of_a_certificate(alert: AlertDescription) -> bool {
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
    let bytes = std::fs::read(path).map_err(|why| bad(path, why))?;
    // Between the certificates there may be anything.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Whom this machine believes, as the client wants it: PEM.
fn machine() -> String {
    let pem = |cert: CertificateDer<'_>| {
        format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(cert))
    };
    rustls_native_certs::load_native_certs().certs.into_iter().map(pem).collect()
}

fn certificates(place: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>> {
    let list = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    match list.map_err(|why| bad(place, why))? {
        none if none.is_empty() => Err(bad(place, "there is no certificate in it")),
        list => Ok(list),
    }
}

type Believer = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

fn believe(place: &str, pem: &str) -> Result<Believer> {
    let mut roots = RootCertStore::empty();
    // Among those of a machine there may be some that nobody understands.
    if roots.add_parsable_certificates(certificates(place, pem)?).0 == 0 {
        return Err(bad(place, "there is no certificate in it that can be understood"));
    }
    let revoked = CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    // Named here, so that another library of the program that brings another provider is no trouble.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .with_crls(revoked.map_err(|why| bad(place, why))?)
        .build()
        .map_err(|why| bad(place, why))?;
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().map_err(|why| bad("TLS", why))?;
    Ok(builder.with_webpki_verifier(verifier))
}
