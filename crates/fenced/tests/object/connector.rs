//! Plain HTTP for `object_store`. Its own way brings a second TLS stack, which a test without TLS has no use for.

use std::error::Error;
use std::io::ErrorKind;

use async_trait::async_trait;
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockkeeper_fenced::object::object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use lockkeeper_fenced::object::object_store::{ClientOptions, Result};

#[derive(Debug)]
pub struct PlainHttp;

impl HttpConnector for PlainHttp {
    fn connect(&self, _: &ClientOptions) -> Result<HttpClient> {
        Ok(HttpClient::new(Plain(Client::builder(TokioExecutor::new()).build_http())))
    }
}

#[derive(Debug)]
struct Plain(Client<hyper_util::client::legacy::connect::HttpConnector, HttpRequestBody>);

#[async_trait]
impl HttpService for Plain {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = self.0.request(request).await.map_err(|e| {
            let kind = if e.is_connect() { HttpErrorKind::Connect } else { kind(&e) };
            HttpError::new(kind, e)
        })?;
        Ok(answer.map(|body| HttpResponseBody::new(body.map_err(|e| HttpError::new(kind(&e), e)))))
    }
}

/// As `object_store` has it for its own client: what ends too early is sent again, what is reset is not, unless it does no harm.
fn kind(error: &(dyn Error + 'static)) -> HttpErrorKind {
    let mut source = Some(error);
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            return match error.kind() {
                ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => {
                    HttpErrorKind::Interrupted
                }
                _ => HttpErrorKind::Unknown,
            };
        }
        source = error.source();
    }
    HttpErrorKind::Request
}
