//! The SDK's client, set up so that nothing happens that we did not ask for.

use aws_config::{BehaviorVersion, Region};
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{Credentials, StalledStreamProtectionConfig};
use aws_smithy_http_client::Builder;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};

use crate::config::Options;
use crate::script::Script;
use crate::wall::WallClock;

/// Where credentials come from is looked up here; nothing is sent to DynamoDB yet.
pub async fn connect(options: &Options, wall: &WallClock) -> Script {
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(options.timeout)
        .operation_attempt_timeout(options.timeout)
        .build();
    // A retry that nobody sees would repeat what may have happened: we decide.
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
    let mut config = aws_sdk_dynamodb::config::Builder::from(&shared.load().await).interceptor(wall.clone());
    config.set_endpoint_url(options.endpoint.clone());
    Script { client: Client::from_conf(config.build()), table: options.table.clone() }
}
