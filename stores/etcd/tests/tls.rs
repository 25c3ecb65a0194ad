//! TLS: the client checks the server's certificate, and shows its own.

mod common;

use common::try_open;
use lockkeeper_core::Error;
use lockkeeper_testkit::laws::{give_back, request, take};
use lockkeeper_testkit::servers::{self, EtcdOptions, TlsFiles, etcd_tls_addr};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_needs_a_trusted_certificate() {
    let (tls, others) = (TlsFiles::new(), TlsFiles::new());
    let Ok(server) = servers::etcd(EtcdOptions { tls: Some(tls.clone()), ..EtcdOptions::default() }) else {
        return;
    };
    let addr = etcd_tls_addr(&server);
    let url = |ca: &TlsFiles| format!("etcds://{addr}?ca={}&timeout=2s", ca.ca_path().display());
    let store = try_open(&url(&tls)).await.unwrap();
    let held = take(&store, &request("x")).await;
    give_back(&store, &held.key).await;
    for wrong in [url(&others), format!("etcds://{addr}?timeout=2s"), format!("etcd://{addr}?timeout=2s")] {
        let error = try_open(&wrong).await.err().expect("the server must not be trusted");
        assert!(matches!(error, Error::Unavailable(_) | Error::Unknown(_)), "{wrong}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_presents_its_certificate() {
    let tls = TlsFiles::new();
    let extra = vec!["--client-cert-auth".into(), format!("--trusted-ca-file={}", tls.ca_path().display())];
    let Ok(server) = servers::etcd(EtcdOptions { tls: Some(tls.clone()), extra }) else { return };
    let addr = etcd_tls_addr(&server);
    let anonymous = format!("etcds://{addr}?ca={}&timeout=2s", tls.ca_path().display());
    let error = try_open(&anonymous).await.err().expect("a client without a certificate is rejected");
    assert!(matches!(error, Error::Unavailable(_) | Error::Unknown(_)), "{error:?}");
    let known = format!("{anonymous}&cert={}&key={}", tls.cert_path().display(), tls.key_path().display());
    let store = try_open(&known).await.unwrap();
    let held = take(&store, &request("x")).await;
    give_back(&store, &held.key).await;
}
