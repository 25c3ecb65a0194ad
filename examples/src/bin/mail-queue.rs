//! Three workers send the mails in a table of a PostgreSQL database. One mail has a bad address, and one worker falls silent.
//!
//! `LOCKKEEPER_POSTGRES` names the database. The program creates the table `example_mails` there, and drops it at the end.

use std::time::Duration;

use lockkeeper::jobs::{ExistingRows, JobTable, Jobs, install};
use lockkeeper::postgres::tokio_postgres::Client;
use lockkeeper::postgres::{Options, connect_to};

type Error = Box<dyn std::error::Error + Send + Sync>;

const MAILS: &str = "
    DROP TABLE IF EXISTS example_mails;
    CREATE TABLE example_mails (id int PRIMARY KEY, address text NOT NULL);
    INSERT INTO example_mails SELECT n, 'customer' || n || '@example.com' FROM generate_series(1, 20) AS n;
    UPDATE example_mails SET address = 'customer13' WHERE id = 13";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let url = std::env::var("LOCKKEEPER_POSTGRES")
        .map_err(|_| "LOCKKEEPER_POSTGRES=postgres://USER@HOST/DATABASE")?;
    let mut client = connect_to(&Options::from_url(&url)?).await?;
    client.batch_execute(MAILS).await?;
    // Once, by the owner of the table; `lockkeeper jobs install --table example_mails` does the same.
    let table = JobTable::find(&mut client, "example_mails").await?;
    install(&mut client, &table, ExistingRows::Open).await?;

    let pause = Duration::from_millis(10);
    let jobs = Jobs::open(&url, "example_mails").await?.rules(Duration::from_secs(60), 3, pause, pause)?;
    // A worker that falls silent: it claims a mail for 100 ms, and does nothing.
    let silent = jobs.clone().rules(Duration::from_millis(100), 3, pause, pause)?;
    let late = silent.claim(1).await?.pop().ok_or("no mail is due")?;

    let workers: Vec<_> = (0..3).map(|_| tokio::spawn(work(url.clone(), jobs.clone()))).collect();
    let mut sent = 0;
    for worker in workers {
        sent += worker.await??;
    }
    println!("3 workers have sent {sent} of 20 mails");
    for mail in jobs.failed(10).await? {
        println!("mail {} has failed for good after {} attempts: {}", mail.key, mail.attempts, mail.error);
    }
    match late.complete().await {
        Err(lockkeeper::Error::Stale { .. }) => println!("the late completion is refused"),
        other => return Err(format!("a late completion was not refused: {other:?}").into()),
    }
    client.batch_execute("DROP TABLE example_mails").await?;
    Ok(())
}

/// Claims mails by the batch until all are sent or have failed for good. Returns how many it has sent.
async fn work(url: String, jobs: Jobs) -> Result<usize, Error> {
    let client = connect_to(&Options::from_url(&url)?).await?;
    let mut sent = 0;
    loop {
        let batch = jobs.claim(4).await?;
        if batch.is_empty() {
            let counts = jobs.counts().await?;
            if counts.due + counts.waiting + counts.taken == 0 {
                return Ok(sent);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let mut done = Vec::new();
        for job in batch {
            // The lease is extended meanwhile. `?`: it is lost, and another worker may have the mail.
            match job.run(send(&client, job.key())).await? {
                Ok(()) => done.push(job),
                Err(why) => drop(job.fail(why.to_string()).await?),
            }
        }
        // One statement for the whole batch.
        for end in jobs.complete_all(done).await {
            end?;
            sent += 1;
        }
    }
}

/// The work. A mail server that takes a message id refuses the second mail of one id; send the fence where a resource can check it.
async fn send(client: &Client, id: &str) -> Result<(), Error> {
    let row =
        client.query_one("SELECT address FROM example_mails WHERE id = $1", &[&id.parse::<i32>()?]).await?;
    match row.get::<_, &str>(0).contains('@') {
        true => Ok(()),
        false => Err("no such address".into()),
    }
}
