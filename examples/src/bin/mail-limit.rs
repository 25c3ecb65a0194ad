//! Mails that no user may send too fast, and all users together neither: start it twice, and the second run finds the buckets as the first left them.

use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper::limit::{PER_HOUR, PER_MINUTE};
use lockkeeper_examples::store_url;

#[tokio::main(flavor = "current_thread")]
async fn main() -> lockkeeper::Result<()> {
    let keeper = Lockkeeper::open(&store_url()).await?;
    let all = keeper.limit("mail/all").rate(60, PER_HOUR).burst(8);
    let mut sent = 0;
    for (user, burst) in [("alice", 3), ("bob", 3), ("carol", 3)] {
        let own = keeper.limit(format!("mail/{user}")).rate(1, PER_MINUTE).burst(burst);
        // One step: if the user or all users together are too fast, neither bucket loses a token.
        let both = keeper.limits([own, all.clone()]);
        loop {
            let taken = both.take(1).await?;
            if let Some(key) = taken.refused() {
                println!("{user} waits for {key}: {} s", taken.retry_after().as_secs() + 1);
                break;
            }
            sent += 1;
        }
    }
    println!("{sent} mails are sent");
    // A caller that has the time waits for its turn; here it has not.
    let turn = all.wait(Duration::from_millis(10)).await?;
    println!("one more: {}", if turn.allowed() { "sent" } else { "not within 10 ms" });
    Ok(())
}
