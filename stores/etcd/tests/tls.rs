//! Encrypted, and only with servers that somebody vouches for.

mod common;

use common::try_open;
use lockkeeper_core::Error;
use lockkeeper_testkit::laws::{ask, give_back, take};
use lockkeeper_testkit::servers::{self, EtcdOptions, TlsFiles, etcd_tls_addr};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_believed_only_if_somebody_vouches_for_it() {
    let (tls, others) = (TlsFiles::new(), TlsFiles::new());
    let Ok(server) = servers::etcd(EtcdOptions { tls: Some(tls.clone()), ..EtcdOptions::default() }) else {
        return;
    };
    let addr = etcd_tls_addr(&server);
    let url = |ca: &TlsFiles| format!("etcds://{addr}?ca={}&timeout=2s", ca.ca_path().display());
    let store = try_open(&url(&tls)).await.unwrap();
    let held = take(&store, &ask("x")).await;
    give_back(&store, &held.claim).await;
    for wrong in [url(&others), format!("etcds://{addr}?timeout=2s"), format!("etcd://{addr}?timeout=2s")] {
        let error = try_open(&wrong).await.err().expect("not to be believed");
        assert!(matches!(error, Error::Unavailable(_) | Error::Unknown(_)), "{wrong}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_shows_who_it_is_where_that_is_asked_for() {
    let tls = TlsFiles::new();
    let extra = vec!["--client-cert-auth".into(), format!("--trusted-ca-file={}", tls.ca_path().display())];
    let Ok(server) = servers::etcd(EtcdOptions { tls: Some(tls.clone()), extra }) else { return };
    let addr = etcd_tls_addr(&server);
    let anonymous = format!("etcds://{addr}?ca={}&timeout=2s", tls.ca_path().display());
    let error = try_open(&anonymous).await.err().expect("nobody knows who it is");
    assert!(matches!(error, Error::Unavailable(_) | Error::Unknown(_)), "{error:?}");
    let known = format!("{anonymous}&cert={}&key={}", tls.cert_path().display(), tls.key_path().display());
    let store = try_open(&known).await.unwrap();
    let held = take(&store, &ask("x")).await;
    give_back(&store, &held.claim).await;
}
