use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::TempDir;

/// A throwaway authority and a certificate that it gave to the servers of 127.0.0.1 and `localhost`, in PEM files.
///
/// Clones share the files; these go with the last one, and with the last options of a server that name them.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, RedisOptions, TlsFiles};
/// let tls = TlsFiles::new();
/// let options = RedisOptions { tls: Some(tls.clone()), ..RedisOptions::default() };
/// let Ok(redis) = servers::redis(options) else { return };
/// println!("rediss://{} with {}", servers::redis_tls_addr(&redis), tls.ca_path().display());
/// ```
#[derive(Clone, Debug)]
pub struct TlsFiles(Arc<TempDir>);

impl TlsFiles {
    /// Makes new ones. Two authorities have nothing in common: a client of one refuses a server of the other.
    ///
    /// # Panics
    /// If the temporary directory cannot be written to.
    #[allow(clippy::new_without_default, reason = "it writes files and may panic")]
    pub fn new() -> TlsFiles {
        let files = TlsFiles(Arc::new(TempDir::new("tls")));
        let (ca, cert, key) = make().expect("certificates can be made");
        for (path, text) in [(files.ca_path(), ca), (files.cert_path(), cert), (files.key_path(), key)] {
            fs::write(&path, text).unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
        }
        files
    }

    /// The certificate of the authority: what a client is to trust.
    pub fn ca_path(&self) -> PathBuf {
        self.0.join("ca.pem")
    }

    /// The certificate of the server.
    pub fn cert_path(&self) -> PathBuf {
        self.0.join("server.pem")
    }

    /// The key of the server.
    pub fn key_path(&self) -> PathBuf {
        self.0.join("server.key")
    }
}

/// The authority's certificate, the server's and the server's key.
fn make() -> Result<(String, String, String), rcgen::Error> {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "Lockkeeper tests");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let server = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    let server = server.signed_by(&key, &authority)?;
    Ok((authority.pem(), server.pem(), key.serialize_pem()))
}
