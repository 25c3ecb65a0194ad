//! Certificates for the servers of tests.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa,
    KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

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
        TlsFiles::of(&["localhost", "127.0.0.1"])
    }

    /// The same for servers of `localhost` alone: to who connects to 127.0.0.1 the certificate is another's.
    ///
    /// # Panics
    /// If the temporary directory cannot be written to.
    pub fn by_name() -> TlsFiles {
        TlsFiles::of(&["localhost"])
    }

    fn of(names: &[&str]) -> TlsFiles {
        let files = TlsFiles(Arc::new(TempDir::new("tls")));
        let made = make(names).expect("certificates can be made");
        let paths = [files.ca_path(), files.cert_path(), files.key_path(), files.revoked_path()];
        for (path, text) in paths.into_iter().zip(made) {
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

    /// The certificate of the authority, and its word that it does not vouch for the server any more.
    pub fn revoked_path(&self) -> PathBuf {
        self.0.join("revoked.pem")
    }
}

/// A connection to a server of this machine that has these certificates, by one that shows them as its own.
pub(super) fn connect(files: &TlsFiles, stream: TcpStream) -> io::Result<impl Read + Write> {
    let list = |path| CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(list(files.ca_path()).map_err(io::Error::other)?);
    let key = PrivateKeyDer::from_pem_file(files.key_path()).map_err(io::Error::other)?;
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_client_auth_cert(list(files.cert_path()).map_err(io::Error::other)?, key)
        .map_err(io::Error::other)?;
    let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
    let session = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    Ok(StreamOwned::new(session, stream))
}

/// The authority's certificate, the server's, the server's key, and what takes the server's certificate back.
fn make(names: &[&str]) -> Result<[String; 4], rcgen::Error> {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "Lockkeeper tests");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let mut server = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
    let serial = SerialNumber::from(7);
    server.serial_number = Some(serial.clone());
    let server = server.signed_by(&key, &authority)?;
    let revoked = authority.pem() + &revoked(serial).signed_by(&authority)?.pem()?;
    Ok([authority.pem(), server.pem(), key.serialize_pem(), revoked])
}

fn revoked(serial_number: SerialNumber) -> CertificateRevocationListParams {
    let revocation_time = date_time_ymd(2001, 1, 1);
    let one = RevokedCertParams { serial_number, revocation_time, reason_code: None, invalidity_date: None };
    CertificateRevocationListParams {
        this_update: revocation_time,
        next_update: date_time_ymd(4096, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![one],
        key_identifier_method: KeyIdMethod::Sha256,
    }
}
