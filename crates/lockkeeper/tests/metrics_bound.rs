//! The bound on the labels of metrics. It is one of the process, so this test is alone in its program.

use std::collections::BTreeSet;

use lockkeeper::metrics::{OTHER, PATTERNS_MAX};
use lockkeeper::{Error, Lockkeeper};
use metrics_exporter_prometheus::PrometheusBuilder;

#[tokio::test]
async fn no_name_becomes_a_label_and_the_labels_are_bounded() {
    let prometheus = PrometheusBuilder::new().install_recorder().unwrap();
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    for i in 0..PATTERNS_MAX * 2 {
        drop(keeper.lock(format!("secret-{i}")).acquire().await.unwrap());
        let request = keeper.lock(format!("secret-{i}")).metrics_pattern(format!("bounded-{i}"));
        drop(request.acquire().await.unwrap());
    }
    let text = prometheus.render();
    assert!(!text.contains("secret"), "{text}");
    let labels: BTreeSet<&str> =
        text.lines().filter_map(|line| line.split_once("pattern=\"")?.1.split('"').next()).collect();
    let bounded = labels.iter().filter(|label| label.starts_with("bounded-")).count();
    assert!(
        bounded == PATTERNS_MAX && labels.len() == PATTERNS_MAX + 1 && labels.contains(OTHER),
        "{labels:?}"
    );
    // Those without a pattern, and those beyond the bound.
    let series = "lockkeeper_requests_total{pattern=\"other\",outcome=\"granted\"} ";
    let other: f64 = text.lines().find_map(|line| line.strip_prefix(series)?.parse().ok()).unwrap();
    assert_eq!(other, (PATTERNS_MAX * 3) as f64);
    let bad = keeper.lock("x").metrics_pattern("").acquire().await;
    assert!(matches!(bad, Err(Error::Invalid(_))), "{bad:?}");
    assert!(keeper.metrics_patterns([""]).is_err() && keeper.metrics_patterns(["a*"]).is_ok());
    assert!(keeper.metrics_patterns(["b*"]).is_err(), "the rules are set once");
}
