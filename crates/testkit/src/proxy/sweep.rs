//! Repeats a test with the fault at the first message, the second, and so on, until the fault does not fire any more.

/// Runs `test` with 1, 2, 3, … until its fault does not fire any more: then every point at which it can happen has been
/// covered. Returns how many there were.
///
/// `test` gets the number of the message to hit and returns whether the fault fired. It should build everything anew.
///
/// # Panics
/// If nothing fired at the first point (the test tests nothing), or if it still fires at point `limit` (it never ends).
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use lockkeeper_testkit::proxy::every_point;
/// let requests_of_the_client = 7;
/// let points = every_point(100, async |n| {
///     // let fault = proxy.inject(Fault::at_request(n).cut_before_reply()); …; fault.fired()
///     n <= requests_of_the_client
/// })
/// .await;
/// assert_eq!(points, 7);
/// # });
/// ```
pub async fn every_point(limit: u64, mut test: impl AsyncFnMut(u64) -> bool) -> u64 {
    for n in 1..=limit {
        if !test(n).await {
            assert!(n > 1, "the fault did not fire even at the first message: this tests nothing");
            return n - 1;
        }
    }
    panic!("the fault still fires at message {limit}: the test does not end, or the limit is too low");
}
