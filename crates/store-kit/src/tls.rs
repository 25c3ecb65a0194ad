//! TLS on rustls: the certificates to trust and to present.

use std::fmt::Display;
use std::sync::Arc;

use lockkeeper_core::{Error, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// Trusts the certificate authorities in the file `ca` (PEM), or else those of the machine; presents `identity` (a certificate and its
/// key, PEM files) to servers that request it. There is no way to skip the check.
///
/// # Errors
/// [`Error::Invalid`] if a file cannot be read or used.
pub fn tls_config(ca: Option<&str>, identity: Option<(&str, &str)>) -> Result<Arc<ClientConfig>> {
    // The provider is named here, so that another library of the program may install another one.
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|why| unusable("TLS", &why))?
        .with_root_certificates(trusted(ca)?);
    let config = match identity {
        None => config.with_no_client_auth(),
        Some((cert, key)) => {
            let chain = CertificateDer::pem_file_iter(cert).map_err(|why| unusable(cert, &why))?;
            let chain = chain.collect::<Result<Vec<_>, _>>().map_err(|why| unusable(cert, &why))?;
            let private = PrivateKeyDer::from_pem_file(key).map_err(|why| unusable(key, &why))?;
            config.with_client_auth_cert(chain, private).map_err(|why| unusable(cert, &why))?
        }
    };
    Ok(Arc::new(config))
}

fn trusted(ca: Option<&str>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(path) = ca else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    for one in CertificateDer::pem_file_iter(path).map_err(|why| unusable(path, &why))? {
        roots.add(one.map_err(|why| unusable(path, &why))?).map_err(|why| unusable(path, &why))?;
    }
    if roots.is_empty() {
        return Err(unusable(path, &"there is no certificate in it"));
    }
    Ok(roots)
}

fn unusable(what: &str, why: &dyn Display) -> Error {
    Error::invalid(format!("{what} cannot be used: {why}"))
}
