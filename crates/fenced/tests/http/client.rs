//! A guard, a client that sends its fence over real HTTP, and a service that checks it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockkeeper::{Error, Lockkeeper};
use lockkeeper_fenced::http::SendFence;
use tower_layer::Layer;
use tower_service::Service;

use super::tools::*;

#[tokio::test]
async fn the_fence_of_the_guard_arrives_and_nothing_is_sent_once_it_is_lost() {
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let ledger = Ledger::default();
    let app = app(&ledger).layer(by_path(&keeper));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}/orders/42", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let put = || Request::put(&url).header("Lock-Fence", "1").body(Full::from("paid")).unwrap();

    let first = Arc::new(keeper.lock("orders/42").ttl(Duration::from_secs(3)).acquire().await.unwrap());
    let mut a = SendFence::new(first.clone()).layer(client.clone());
    assert_eq!(a.call(put()).await.unwrap().status(), 201);
    keeper.break_lock("orders/42", "to see what happens").await.unwrap();
    let second = Arc::new(keeper.lock("orders/42").acquire().await.unwrap());
    let mut b = SendFence::new(second.clone()).layer(client);
    assert_eq!(b.call(put()).await.unwrap().status(), 201);
    // It may not have heard of it yet; then it is the service that refuses.
    if first.is_held() {
        assert!(a.call(put()).await.is_ok_and(|answer| answer.status() == 412) || !first.is_held());
    }
    first.lost().await;
    let error = a.call(put()).await.unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Error::Lost(_))), "{error}");
    assert_eq!(ledger.read(), [first.fence().get(), second.fence().get()]);
}
