//! The SDK's client, without retries of its own.

use aws_config::{BehaviorVersion, Region};
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{Credentials, StalledStreamProtectionConfig};
use aws_smithy_http_client::Builder;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};

use crate::config::Options;
use crate::server_clock::DynamoClock;
use crate::statements::TableClient;

/// Creates the client and finds where credentials come from. Sends nothing to DynamoDB yet.
pub async fn connect(options: &Options, clock: &DynamoClock) -> TableClient {
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(options.timeout)
        .operation_attempt_timeout(options.timeout)
        .build();
    // A retry inside the SDK would repeat a write whose outcome is unknown, so the store decides on retries.
    let shared = aws_config::defaults(BehaviorVersion::latest())
        .http_client(Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).build_https())
        .region(Region::new(options.region.clone()))
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .timeout_config(timeouts);
    let shared = match &options.login {
        Some((key, secret)) => shared.credentials_provider(Credentials::new(
            key,
            secret.expose(),
            None,
            None,
            "the address of the store",
        )),
        None => shared,
    };
    let mut config = aws_sdk_dynamodb::config::Builder::from(&shared.load().await).interceptor(clock.clone());
    config.set_endpoint_url(options.endpoint.clone());
    TableClient { client: Client::from_conf(config.build()), table: options.table.clone() }
}
